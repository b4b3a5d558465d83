//! Combines attention over two sets of keys, as in ring attention.

use super::rows::RawRows;
use super::{Rows, RowsMut};
use crate::cpu::Cpu;
use crate::{AttentionShape, Float};

/// Merges the result over another block of keys into `out` and `lse` by log-sum-exp. A query without visible keys on
/// one side keeps the result of the other.
pub fn merge<E: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    out: &mut [E],   // (batch * q_len, heads * head_dim)
    lse: &mut [f32], // (batch, heads, q_len)
    (other_out, other_lse): (&[E], &[f32]),
) {
    let AttentionShape { batch, heads, head_dim, q_len, .. } = *shape;
    let (rows, width) = (batch * q_len, heads * head_dim);
    assert_eq!(
        (lse.len(), other_lse.len()),
        (rows * heads, rows * heads),
        "lse is (batch, heads, q_len)"
    );
    let into = RawRows::new_mut(&RowsMut::whole(out, width), rows, width, "out");
    let from = RawRows::new(&Rows::whole(other_out, width), rows, width, "other_out");
    let into_lse = RawRows::new_mut(&RowsMut::whole(lse, rows * heads), 1, rows * heads, "lse");
    cpu.team.split(batch * heads, 1, &|range| {
        for (batch, head) in range.map(|number| (number / heads, number % heads)) {
            for at in 0..q_len {
                let place = (batch * heads + head) * q_len + at;
                // SAFETY: each (batch, head) belongs to one thread, and with it these elements of out and lse.
                let (ours, into, from) = unsafe {
                    let (row, column) = (batch * q_len + at, head * head_dim);
                    (
                        &mut *into_lse.at(0, place),
                        std::slice::from_raw_parts_mut(into.at(row, column), head_dim),
                        std::slice::from_raw_parts(from.at(row, column), head_dim),
                    )
                };
                let (max, min) = (ours.max(other_lse[place]), ours.min(other_lse[place]));
                if max == f32::NEG_INFINITY {
                    continue;
                }
                let both = max + (min - max).exp().ln_1p();
                let (here, there) = ((*ours - both).exp(), (other_lse[place] - both).exp());
                for (ours, theirs) in into.iter_mut().zip(from) {
                    *ours = E::round_from(ours.as_f32() * here + theirs.as_f32() * there);
                }
                *ours = both;
            }
        }
    });
}
