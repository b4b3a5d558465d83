//! Random numbers by index.

use crate::RandomKey;

/// A uniform number in [0, 1).
pub fn uniform(key: RandomKey, index: u64) -> f64 {
    (key.word(index) >> 8) as f64 / 2f64.powi(24)
}

/// A standard normal number (Box-Muller). Indices 64 apart form a pair: the first word gives the radius, the second
/// the angle.
pub fn normal(key: RandomKey, index: u64) -> f64 {
    let second = index / 64 % 2 == 1;
    let first = if second { index - 64 } else { index };
    // Rounded to f32 by definition, which matters near 1, where the logarithm is almost 0.
    let uniform = (key.word(first) as f32 * 2f32.powi(-32) + 2f32.powi(-33)) as f64;
    let angle = key.word(first + 64) as i32 as f64 / 2f64.powi(32) * std::f64::consts::TAU;
    (-2.0 * uniform.ln()).sqrt() * if second { angle.sin() } else { angle.cos() }
}
