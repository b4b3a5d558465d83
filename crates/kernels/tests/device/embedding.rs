use lockstep_kernels::reference::embedding as reference;
use lockstep_kernels::{Float, PositionRange, VocabShard};

use crate::check::*;

crate::both_types!(matches_the_reference);

/// tokens, dim, rows of the table, first id, size of the vocabulary
const CASES: [[usize; 5]; 12] = [
    [0, 8, 5, 0, 5],
    [1, 1, 1, 0, 1],
    [17, 7, 11, 0, 11],
    [37, 24, 10, 20, 50],
    [5000, 17, 3, 1, 5],
    [1000, 64, 300, 0, 300],
    [4100, 264, 70_000, 100, 70_200],
    [3, 2000, 9, 0, 9],
    [64, 8, 1, 0, 1],
    [640, 16, 1, 0, 1],
    [500, 264, 2, 0, 2],
    [3000, 136, 40, 2, 43],
];

fn matches_the_reference<E: Float>() {
    for ([tokens, dim, rows, first, vocab], offset) in
        CASES.into_iter().flat_map(|case| OFFSETS.map(|offset| (case, offset)))
    {
        let shard = VocabShard { first, vocab };
        let range = PositionRange { start: 2, len: 13 };
        let ids = integers(tokens, vocab, 1);
        let (table, positions) = (numbers::<E>(rows * dim, 2), numbers::<E>(15 * dim, 3));
        let dy = numbers::<E>(tokens * dim, 4);
        let (before, before_positions) =
            (numbers::<f32>(rows * dim, 5), numbers::<f32>(15 * dim, 6));
        let plus = |a: &[f64], b: &[f32]| -> Vec<f64> {
            a.iter().zip(b).map(|(a, b)| a + *b as f64).collect()
        };
        let with = Some((&to_f64(&positions)[..], range));
        let dtable = reference::backward(&ids, &to_f64(&dy), dim, shard, rows);
        let dpositions = reference::positions_backward(&to_f64(&dy), dim, range, 15);
        let expected = [
            reference::forward(&ids, &to_f64(&table), dim, shard, None),
            reference::forward(&ids, &to_f64(&table), dim, shard, with),
            plus(&dtable, &before),
            plus(&dpositions, &before_positions),
            dtable,
            dpositions,
        ];
        let what = format!("{tokens} tokens, {rows} of {vocab} from {offset}");
        check(&what, tolerance::<E>(3e-5), expected, || {
            let ids = Data::row(0, &ids);
            let (table, positions) =
                (Data::new(offset, (rows, dim), &table), Data::new(offset, (15, dim), &positions));
            let dy = Data::new(offset, (tokens, dim), &dy);
            let [mut plain, mut placed] = [(); 2]
                .map(|_| Data::new(offset, (tokens, dim), &vec![E::default(); tokens * dim]));
            device().embed(ids.view(), table.view(), shard, None, plain.view_mut());
            let with = Some((positions.view(), range));
            device().embed(ids.view(), table.view(), shard, with, placed.view_mut());
            let [mut dtable, mut added] = [(); 2].map(|_| Data::new(offset, (rows, dim), &before));
            device().embed_backward(ids.view(), dy.view(), shard, dtable.view_mut(), false);
            device().embed_backward(ids.view(), dy.view(), shard, added.view_mut(), true);
            let [mut dpositions, mut added_positions] =
                [(); 2].map(|_| Data::new(offset, (15, dim), &before_positions));
            device().embed_positions_backward(dy.view(), range, dpositions.view_mut(), false);
            device().embed_positions_backward(dy.view(), range, added_positions.view_mut(), true);
            let [plain, placed] = [plain, placed].map(|x| x.read_f64::<E>());
            let [added, added_positions, dtable, dpositions] =
                [added, added_positions, dtable, dpositions].map(|x| x.read_f64::<f32>());
            [plain, placed, added, added_positions, dtable, dpositions]
        });
    }
}
