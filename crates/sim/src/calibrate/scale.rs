//! Scales the efficiency of a cluster's accelerator to match measured step times.

use lockstep_plan::Plan;

use crate::cluster::{Accelerator, Cluster};
use crate::estimate::{Options, estimate};

/// Multiplies all efficiencies of the accelerator by one factor, so that the measured steps (in seconds) are predicted
/// correctly on average.
pub fn calibrate(cluster: &Cluster, options: &Options, measured: &[(&Plan, f64)]) -> Cluster {
    // Mean logarithm of predicted over measured time, which falls as the factor grows.
    let too_slow = |factor: f64| {
        let scaled = scaled(cluster, factor);
        let ratio = |(plan, seconds): &(&Plan, f64)| {
            (estimate(plan, &scaled, options).step_s / seconds).ln()
        };
        measured.iter().map(ratio).sum::<f64>() > 0.0
    };
    let (mut least, mut most) = (1.0 / 256.0, 256.0);
    for _ in 0..60 {
        let middle = f64::sqrt(least * most);
        if too_slow(middle) {
            least = middle;
        } else {
            most = middle;
        }
    }
    scaled(cluster, f64::sqrt(least * most))
}

fn scaled(cluster: &Cluster, factor: f64) -> Cluster {
    let device = &cluster.accelerator;
    let mut matmul = device.matmul.clone();
    matmul.best *= factor;
    let attention = device.attention.map(|(best, half)| (best * factor, half));
    let accelerator =
        Accelerator { matmul, attention, stream: device.stream * factor, ..device.clone() };
    Cluster { accelerator, ..cluster.clone() }
}
