//! Attention over two sets of keys from the attention over each: what a ring of key blocks sums up.

use super::rows::Reach;
use super::{AttentionShape, Rows, RowsMut};
use crate::Float;
use crate::cpu::Cpu;

/// Takes another block of keys into `out` and `lse`: afterwards they are what attention over both sets of
/// keys gives. A query that saw no key on one side keeps the other side's result.
pub fn merge<E: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    out: &mut [E],     // (batch * q_len, heads * head_dim)
    lse: &mut [f32],   // (batch, heads, q_len)
    other_out: &[E],   // as out
    other_lse: &[f32], // as lse
) {
    let AttentionShape { batch, heads, head_dim, q_len, .. } = *shape;
    let (rows, width) = (batch * q_len, heads * head_dim);
    assert_eq!(
        (lse.len(), other_lse.len()),
        (rows * heads, rows * heads),
        "lse is (batch, heads, q_len)"
    );
    let into = Reach::write(&RowsMut::whole(out, width), rows, width, "out");
    let from =
        Reach::read(&Rows { data: other_out, offset: 0, stride: width }, rows, width, "other_out");
    let into_lse = Reach::write(&RowsMut::whole(lse, rows * heads), 1, rows * heads, "lse");
    cpu.team.split(batch * heads, 1, &|mine| {
        for (batch, head) in mine.map(|number| (number / heads, number % heads)) {
            for at in 0..q_len {
                let place = (batch * heads + head) * q_len + at;
                // SAFETY: each (batch, head) is one member's, and with it these elements of out and lse.
                let (ours, into, from) = unsafe {
                    let (row, column) = (batch * q_len + at, head * head_dim);
                    (
                        &mut *into_lse.at(0, place),
                        std::slice::from_raw_parts_mut(into.at(row, column), head_dim),
                        std::slice::from_raw_parts(from.at(row, column), head_dim),
                    )
                };
                let (top, bottom) = (ours.max(other_lse[place]), ours.min(other_lse[place]));
                if top == f32::NEG_INFINITY {
                    continue;
                }
                let both = top + (bottom - top).exp().ln_1p();
                let (here, there) = ((*ours - both).exp(), (other_lse[place] - both).exp());
                for (ours, theirs) in into.iter_mut().zip(from) {
                    *ours = E::round_from(ours.as_f32() * here + theirs.as_f32() * there);
                }
                *ours = both;
            }
        }
    });
}
