//! Helpers: run an operation at every level and compare it with its reference.

use lockstep_kernels::Float;
use lockstep_kernels::RandomKey;
use lockstep_kernels::cpu::random;
use lockstep_kernels::cpu::{Cpu, Level};

/// Lengths with all kinds of vector remainders, and one long enough for several threads.
pub const LENGTHS: [usize; 6] = [0, 1, 7, 17, 1000, 20_003];

/// (rows, width) with the same properties.
pub const SHAPES: [(usize, usize); 7] =
    [(0, 8), (1, 1), (7, 17), (17, 1000), (1000, 7), (300, 128), (64, 200)];

/// `n` normal random numbers, rounded to `E`.
pub fn numbers<E: Float>(n: usize, stream: u64) -> Vec<E> {
    let mut out = vec![E::default(); n];
    random::normal(&Cpu::at(Level::Portable, 1), RandomKey { seed: 7, stream }, 0, &mut out, 1.0);
    out
}

/// `n` random integers below `bound`.
pub fn integers(n: usize, bound: usize, stream: u64) -> Vec<u32> {
    let key = RandomKey { seed: 11, stream };
    (0..n as u64).map(|i| key.word(i) % bound.max(1) as u32).collect()
}

pub fn to_f64<E: Float>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.as_f32() as f64).collect()
}

/// Relative tolerance: the bound for f32, plus half a unit in the last place for bf16.
pub fn tolerance<E: Float>(f32_bound: f64) -> f64 {
    if size_of::<E>() == 2 { f32_bound + 2f64.powi(-8) } else { f32_bound }
}

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

#[track_caller]
pub fn close(what: &str, tolerance: f64, expected: &[f64], got: &[f64]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        let off = (expected - got).abs() / expected.abs().max(1.0);
        assert!(off <= tolerance || expected == got, "{what}[{i}]: {got}, expected {expected}");
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

/// Instantiates a generic test for f32 and bf16.
#[macro_export]
macro_rules! both_types {
    ($($test:ident)*) => {$(
        mod $test {
            #[test]
            fn f32() {
                super::$test::<f32>();
            }
            #[test]
            fn bf16() {
                super::$test::<half::bf16>();
            }
        }
    )*};
}
