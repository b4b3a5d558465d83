use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::Cpu;
use lockstep_kernels::cpu::embedding::{self, TableGradient, Tokens};
use lockstep_kernels::reference::embedding as reference;
use lockstep_kernels::{PositionRange, VocabShard};

crate::both_types!(matches_the_reference);

fn matches_the_reference<E: Float>() {
    for (n, dim) in [(0, 4), (1, 1), (7, 17), (1000, 33), (200, 128)] {
        // The whole vocabulary, and the second of three shards.
        for (shard, rows) in [(VocabShard::all(50), 50), (VocabShard { first: 17, vocab: 50 }, 17)]
        {
            let (ids, table, dy) =
                (integers(n, 50, 1), numbers::<E>(rows * dim, 2), numbers::<E>(n * dim, 3));
            let (positions, place) =
                (numbers::<E>(12 * dim, 4), PositionRange { start: 3, len: 9 });
            let out = reference::forward(&ids, &to_f64(&table), dim, shard, None);
            let placed = reference::forward(
                &ids,
                &to_f64(&table),
                dim,
                shard,
                Some((&to_f64(&positions), place)),
            );
            let dtable = reference::backward(&ids, &to_f64(&dy), dim, shard, rows);
            let dpositions = reference::positions_backward(&to_f64(&dy), dim, place, 12);
            let expected =
                [out, placed, dtable, dpositions.iter().map(|d| d + 1.0).collect(), dpositions];
            everywhere(
                &format!("embedding ({n}, {dim}) {shard:?}"),
                tolerance::<E>(1e-5),
                expected,
                |cpu| {
                    let (mut out, mut placed) =
                        (vec![E::default(); n * dim], vec![E::default(); n * dim]);
                    let tokens = Tokens { ids: &ids, shard };
                    embedding::forward(cpu, tokens, &table, None, &mut out);
                    embedding::forward(cpu, tokens, &table, Some((&positions, place)), &mut placed);
                    let mut dtable = vec![1.0; rows * dim];
                    let gradient = TableGradient { table: &mut dtable, accumulate: false };
                    embedding::backward(cpu, tokens, &dy, gradient);
                    let (mut added, mut dpositions) = (vec![1.0; 12 * dim], vec![1.0; 12 * dim]);
                    let gradient = TableGradient { table: &mut added, accumulate: true };
                    embedding::positions_backward(cpu, &dy, dim, place, gradient);
                    let gradient = TableGradient { table: &mut dpositions, accumulate: false };
                    embedding::positions_backward(cpu, &dy, dim, place, gradient);
                    [
                        to_f64(&out),
                        to_f64(&placed),
                        to_f64(&dtable),
                        to_f64(&added),
                        to_f64(&dpositions),
                    ]
                },
            );
        }
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    let (ids, dim, place) = ([3, 1, 3, 0, 2], 4, PositionRange { start: 1, len: 3 });
    let (table, positions, dy) =
        (numbers::<f32>(16, 1), numbers::<f32>(16, 2), numbers::<f32>(20, 3));
    let (table, positions, dy, shard) =
        (to_f64(&table), to_f64(&positions), to_f64(&dy), VocabShard::all(4));
    let loss = |table: &[f64], positions: &[f64]| {
        dot(&reference::forward(&ids, table, dim, shard, Some((positions, place))), &dy)
    };
    let expected = finite_differences(&table, |table| loss(table, &positions));
    close("table", 1e-8, &expected, &reference::backward(&ids, &dy, dim, shard, 4));
    let expected = finite_differences(&positions, |positions| loss(&table, positions));
    close("positions", 1e-8, &expected, &reference::positions_backward(&dy, dim, place, 4));
}

#[test]
#[should_panic(expected = "token id 50 is out of range: the vocabulary has 50 tokens")]
fn an_id_outside_the_vocabulary_panics() {
    embedding::forward(
        &Cpu::new(1),
        Tokens { ids: &[3, 50], shard: VocabShard::all(50) },
        &[0f32; 100],
        None,
        &mut [0.0; 4],
    );
}

#[test]
#[should_panic(expected = "position 4 is out of range: the table has 4")]
fn a_position_outside_the_table_panics() {
    let place = PositionRange { start: 3, len: 2 };
    embedding::forward(
        &Cpu::new(1),
        Tokens { ids: &[3, 0], shard: VocabShard::all(50) },
        &[0f32; 100],
        Some((&[0.0; 8], place)),
        &mut [0.0; 4],
    );
}
