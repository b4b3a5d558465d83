//! What a backward pass must know of its queries beside their log-sum-exp, computed once where they meet their
//! keys in several blocks.

use super::known::dot;
use crate::Float;
use crate::cpu::Cpu;
use crate::cpu::cut::{cut, split, worth};
use crate::cpu::vector::{Job, Vector, run};

/// D = the sum of dout out over each head of each token (FlashAttention-2, Dao 2023). `out` is what came of
/// all blocks together.
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
    split(&cpu.team, delta.len(), worth(head_dim), cut(delta, 1), |heads, delta| {
        let part = heads.start * head_dim..heads.end * head_dim;
        let job = Dots { head_dim, out: &out[part.clone()], dout: &dout[part], delta };
        // SAFETY: the slices are as long as the job says.
        unsafe { run(cpu.level, job) };
    });
}

struct Dots<'a, E> {
    head_dim: usize,
    out: &'a [E],
    dout: &'a [E],
    delta: &'a mut [f32],
}

impl<E: Float> Job for Dots<'_, E> {
    /// # Safety
    /// None of its own.
    #[inline(always)]
    unsafe fn on<V: Vector>(self) {
        let rows = self.out.chunks_exact(self.head_dim).zip(self.dout.chunks_exact(self.head_dim));
        for (delta, (out, dout)) in self.delta.iter_mut().zip(rows) {
            *delta = dot(out, dout);
        }
    }
}
