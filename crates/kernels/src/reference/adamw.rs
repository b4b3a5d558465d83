//! AdamW for one element.

use crate::AdamW;

/// Updated (p, m, v).
pub fn step(settings: &AdamW, p: f64, m: f64, v: f64, g: f64) -> (f64, f64, f64) {
    let AdamW { lr, beta1, beta2, eps, weight_decay, step, scale } = *settings;
    let g = g * scale;
    let m = beta1 * m + (1.0 - beta1) * g;
    let v = beta2 * v + (1.0 - beta2) * g * g;
    let m_hat = m / (1.0 - beta1.powf(step as f64));
    let v_hat = v / (1.0 - beta2.powf(step as f64));
    (p * (1.0 - lr * weight_decay) - lr * m_hat / (v_hat.sqrt() + eps), m, v)
}
