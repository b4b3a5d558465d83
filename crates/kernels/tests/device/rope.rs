use lockstep_kernels::reference::rope as reference;
use lockstep_kernels::{AttentionShape, Float, RopeTable};

use crate::check::*;

crate::both_types!(matches_the_reference);

const THETA: f64 = 10_000.0;

/// batch, heads, key heads, head_dim, sequence length, first position
const CASES: [[usize; 6]; 7] = [
    [0, 1, 1, 2, 3, 0],
    [1, 1, 1, 2, 1, 0],
    [2, 3, 1, 8, 7, 5],
    [1, 4, 2, 10, 33, 100],
    [3, 12, 12, 64, 20, 0],
    [2, 8, 2, 80, 9, 17],
    [1, 3, 3, 640, 5, 1],
];

fn matches_the_reference<E: Float>() {
    for ([batch, heads, kv_heads, head_dim, q_len, q_start], offset) in
        CASES.into_iter().flat_map(|case| OFFSETS.map(|offset| (case, offset)))
    {
        let shape = AttentionShape {
            q_start,
            ..AttentionShape::square(batch, q_len, heads, kv_heads, head_dim)
        };
        let table = RopeTable::new(head_dim, 200, THETA, None);
        let (rows, width) = (batch * q_len, (heads + 2 * kv_heads) * head_dim);
        let qkv = numbers::<E>(rows * width, 1);
        let expected = [reference::forward, reference::backward].map(|turn| {
            let mut expected = to_f64(&qkv);
            for (row, data) in expected.chunks_mut(width).enumerate() {
                let rotated = &mut data[..(heads + kv_heads) * head_dim];
                for head in rotated.chunks_mut(head_dim) {
                    turn(head, (q_start + row % q_len) as f64, THETA);
                }
            }
            expected
        });
        check(&format!("{shape:?} from {offset}"), tolerance::<E>(3e-6), expected, || {
            let [mut forward, mut backward] =
                [(); 2].map(|_| Data::new(offset, (rows, width), &qkv));
            device().rope(&table, &shape, forward.view_mut());
            device().rope_backward(&table, &shape, backward.view_mut());
            [forward, backward].map(|x| x.read_f64::<E>())
        });
    }
}
