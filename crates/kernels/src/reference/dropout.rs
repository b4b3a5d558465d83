//! Dropout by an element's global index.

use crate::cpu::dropout::Dropout;

pub fn apply(drop: &Dropout, x: &[f64]) -> Vec<f64> {
    let one = |(i, x): (usize, &f64)| {
        let index = drop.first + (i / drop.width) as u64 * drop.stride + (i % drop.width) as u64;
        let dropped = (drop.key.word(index) as f64) < (drop.p as f64 * 2f64.powi(32)).floor();
        if dropped { 0.0 } else { x / (1.0 - drop.p as f64) }
    };
    x.iter().enumerate().map(one).collect()
}
