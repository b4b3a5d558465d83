//! GELU in the tanh approximation of GPT-2.

use std::f64::consts::PI;

pub fn forward(x: f64) -> f64 {
    0.5 * x * (1.0 + inner(x).tanh())
}

/// Derivative at `x`.
pub fn slope(x: f64) -> f64 {
    let t = inner(x).tanh();
    let inner_slope = (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope
}

fn inner(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))
}
