//! Dropout by the global index of an element.

use crate::DropoutMask;

pub fn apply(mask: &DropoutMask, x: &[f64]) -> Vec<f64> {
    let p = mask.p as f64;
    let one = |(i, x): (usize, &f64)| {
        let dropped = (mask.key.word(mask.first + i as u64) as f64) < (p * 2f64.powi(32)).floor();
        if dropped { 0.0 } else { x / (1.0 - p) }
    };
    x.iter().enumerate().map(one).collect()
}
