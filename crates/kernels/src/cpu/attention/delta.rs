//! D = Σ dout · out of each query, for backward passes over several blocks of keys.

use super::query_stats::dot;
use crate::Float;
use crate::cpu::Cpu;
use crate::cpu::partition::{by_rows, grain_rows, parallel_for};
use crate::cpu::vector::{Vector, WithSimd, dispatch};

/// Computes D = Σ dout · out over each head of each token (FlashAttention-2, Dao 2023). `out` is the merged output of
/// all blocks.
pub fn delta<E: Float>(
    cpu: &Cpu,
    head_dim: usize,
    out: &[E],         // (tokens, heads * head_dim)
    dout: &[E],        // as out
    delta: &mut [f32], // (tokens, heads)
) {
    let elements = delta.len() * head_dim;
    assert_eq!(
        (out.len(), dout.len()),
        (elements, elements),
        "out and dout of {} heads of {head_dim}",
        delta.len()
    );
    parallel_for(
        &cpu.team,
        delta.len(),
        grain_rows(head_dim),
        by_rows(delta, 1),
        |heads, delta| {
            let part = heads.start * head_dim..heads.end * head_dim;
            let job = Dots { head_dim, out: &out[part.clone()], dout: &dout[part], delta };
            // SAFETY: the slices have matching lengths.
            unsafe { dispatch(cpu.level, job) };
        },
    );
}

struct Dots<'a, E> {
    head_dim: usize,
    out: &'a [E],
    dout: &'a [E],
    delta: &'a mut [f32],
}

impl<E: Float> WithSimd for Dots<'_, E> {
    /// # Safety
    /// See `WithSimd`.
    #[inline(always)]
    unsafe fn with_simd<V: Vector>(self) {
        let rows = self.out.chunks_exact(self.head_dim).zip(self.dout.chunks_exact(self.head_dim));
        for (delta, (out, dout)) in self.delta.iter_mut().zip(rows) {
            *delta = dot(out, dout);
        }
    }
}
