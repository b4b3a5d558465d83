//! Helpers: run an operation at every level and compare it with its reference.

use lockstep_kernels::cpu::{Cpu, Level};

#[path = "../common/mod.rs"]
mod common;
pub use common::*;

/// Lengths with all kinds of vector remainders, and one long enough for several threads.
pub const LENGTHS: [usize; 6] = [0, 1, 7, 17, 1000, 20_003];

/// (rows, width) with the same properties.
pub const SHAPES: [(usize, usize); 7] =
    [(0, 8), (1, 1), (7, 17), (17, 1000), (1000, 7), (300, 128), (64, 200)];

/// Runs `work` at every level, with one thread and with three: the same bits, and within `tolerance` of
/// `expected` (relative to the value, or absolute below 1).
#[track_caller]
pub fn everywhere<const N: usize>(
    what: &str,
    tolerance: f64,
    expected: [Vec<f64>; N],
    work: impl Fn(&Cpu) -> [Vec<f64>; N],
) {
    for level in Level::of_this_machine().and_below() {
        let single = work(&Cpu::at(level, 1));
        let three = work(&Cpu::at(level, 3));
        for (output, (single, three)) in single.iter().zip(&three).enumerate() {
            for (i, (a, b)) in single.iter().zip(three).enumerate() {
                let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                assert!(
                    same,
                    "{what}, {level:?}, output {output}[{i}]: {a} on one thread, {b} on three"
                );
            }
            close(
                &format!("{what}, {level:?}, output {output}"),
                tolerance,
                &expected[output],
                single,
            );
        }
    }
}

/// Central finite differences of `f` by every element of `x`.
pub fn finite_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let (h, at) = (1e-5, x[i]);
            x[i] = at + h;
            let above = f(&x);
            x[i] = at - h;
            let below = f(&x);
            x[i] = at;
            (above - below) / (2.0 * h)
        })
        .collect()
}

/// Σ a b, which turns an output into a scalar with a known gradient.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
