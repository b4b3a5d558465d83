//! Pseudo-random numbers that are equal on every rank and in every run.

use half::{bf16, f16};
use lockstep_comm::{Element, bytes_of};

/// SplitMix64 with a seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in [-1, 1], with all mantissa bits used.
    pub fn unit(&mut self) -> f64 {
        self.next() as f64 / (u64::MAX / 2) as f64 - 1.0
    }
}

/// Floating-point types, whose sums depend on the order.
pub trait Float: Element {
    fn round(value: f64) -> Self;
    fn exact(self) -> f64;
    /// Half the distance from 1 to the next number.
    const UNIT: f64;
}

macro_rules! floats {
    ($($t:ty, $unit:expr, $round:expr, $exact:expr);* $(;)?) => {$(
        impl Float for $t {
            const UNIT: f64 = $unit;
            fn round(value: f64) -> $t {
                ($round)(value)
            }
            fn exact(self) -> f64 {
                ($exact)(self)
            }
        }
    )*};
}

floats!(
    f32, 6e-8, |v| v as f32, f64::from;
    f64, 1.2e-16, |v| v, |v| v;
    f16, 4.9e-4, f16::from_f64, f16::to_f64;
    bf16, 3.91e-3, bf16::from_f64, bf16::to_f64;
);

/// Input of a rank.
pub fn random_inputs<T: Float>(seed: u64, rank: usize, len: usize) -> Vec<T> {
    let mut random = Random(seed ^ (rank as u64) << 32);
    (0..len).map(|_| T::round(random.unit())).collect()
}

/// A hash of the raw bytes (FNV-1a).
pub fn hash<T: Element>(numbers: &[T]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes_of(numbers).iter().fold(0xcbf2_9ce4_8422_2325, step)
}
