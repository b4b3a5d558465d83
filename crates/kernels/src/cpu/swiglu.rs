//! SwiGLU (Shazeer 2020): rows of gate and up, (rows, 2f), become `silu(gate) * up`, (rows, f).

use super::Cpu;
use super::math::sigmoid;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::multiversion;
use crate::Float;

/// `gate_up` (rows, 2f): each row has its gates first, then its ups. `out` is (rows, f).
pub fn forward<E: Float>(cpu: &Cpu, gate_up: &[E], f: usize, out: &mut [E]) {
    let rows = rows(gate_up, f, out.len());
    parallel_for(&cpu.team, rows, grain_rows(f), by_rows(out, f), |rows, out| {
        forward_rows(cpu.level, &gate_up[rows.start * 2 * f..], f, out);
    });
}

/// `d_gate_up` (rows, 2f) from `dy` (rows, f).
pub fn backward<E: Float>(cpu: &Cpu, gate_up: &[E], f: usize, dy: &[E], d_gate_up: &mut [E]) {
    let rows = rows(gate_up, f, dy.len());
    assert_eq!(d_gate_up.len(), gate_up.len());
    parallel_for(&cpu.team, rows, grain_rows(f), by_rows(d_gate_up, 2 * f), |rows, d_gate_up| {
        backward_rows(
            cpu.level,
            &gate_up[rows.start * 2 * f..],
            f,
            &dy[rows.start * f..],
            d_gate_up,
        );
    });
}

fn rows<E>(gate_up: &[E], f: usize, elements: usize) -> usize {
    assert!(f > 0 && elements.is_multiple_of(f), "{elements} elements are not a multiple of f={f}");
    assert_eq!(
        gate_up.len(),
        2 * elements,
        "gate_up must have two elements for each of {elements}"
    );
    elements / f
}

/// `silu(gate)`, and its derivative σ (1 + gate (1 - σ)) times up.
#[inline(always)]
fn silu_and_slope<I: super::simd::Isa>(gate: f32, up: f32) -> (f32, f32) {
    let s = sigmoid::<I>(gate);
    (gate * s, I::fma(gate * s, 1.0 - s, s) * up)
}

multiversion! {
    fn forward_rows<I, E: Float>(gate_up: &[E], f: usize, out: &mut [E]) {
        for (gate_up, out) in gate_up.chunks_exact(2 * f).zip(out.chunks_exact_mut(f)) {
            let (gate, up, out) = (&gate_up[..f], &gate_up[f..][..f], &mut out[..f]);
            for j in 0..f {
                let gate = gate[j].as_f32();
                out[j] = E::round_from(gate * sigmoid::<I>(gate) * up[j].as_f32());
            }
        }
    }

    fn backward_rows<I, E: Float>(gate_up: &[E], f: usize, dy: &[E], d_gate_up: &mut [E]) {
        let rows = gate_up.chunks_exact(2 * f).zip(dy.chunks_exact(f)).zip(d_gate_up.chunks_exact_mut(2 * f));
        for ((gate_up, dy), d_gate_up) in rows {
            let (gate, up, dy) = (&gate_up[..f], &gate_up[f..][..f], &dy[..f]);
            let (d_gate, d_up) = d_gate_up.split_at_mut(f);
            let d_up = &mut d_up[..f];
            for j in 0..f {
                let dy = dy[j].as_f32();
                let (silu, slope) = silu_and_slope::<I>(gate[j].as_f32(), up[j].as_f32());
                d_gate[j] = E::round_from(dy * slope);
                d_up[j] = E::round_from(dy * silu);
            }
        }
    }
}
