//! Random numbers by position, one index at a time.

use crate::RandomKey;

/// In [0, 1).
pub fn uniform(key: RandomKey, index: u64) -> f64 {
    (key.word(index) >> 8) as f64 / 2f64.powi(24)
}

/// Standard normal: indices 64 apart make a pair, the first's word the distance and the second's the direction.
pub fn normal(key: RandomKey, index: u64) -> f64 {
    let second = index / 64 % 2 == 1;
    let first = if second { index - 64 } else { index };
    // Rounded to f32 by definition: near 1, where its logarithm is almost 0, that is felt.
    let far = (key.word(first) as f32 * 2f32.powi(-32) + 2f32.powi(-33)) as f64;
    let angle = key.word(first + 64) as i32 as f64 / 2f64.powi(32) * std::f64::consts::TAU;
    (-2.0 * far.ln()).sqrt() * if second { angle.sin() } else { angle.cos() }
}
