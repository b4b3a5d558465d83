//! Test data, tolerances and comparisons that all test binaries of this crate share.

use lockstep_kernels::cpu::random;
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::{Float, RandomKey};

/// `n` normal random numbers, rounded to `E`, from the portable CPU implementation.
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

#[track_caller]
pub fn close(what: &str, tolerance: f64, expected: &[f64], got: &[f64]) {
    assert_eq!(expected.len(), got.len(), "{what}");
    for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
        let off = (expected - got).abs() / expected.abs().max(1.0);
        assert!(off <= tolerance || expected == got, "{what}[{i}]: {got}, expected {expected}");
    }
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
