//! Scales the efficiency of a cluster's accelerator to match measured step times.

use lockstep_plan::Plan;

use crate::cluster::{Accelerator, Cluster, MatmulOverheads};
use crate::compute::OpClass;
use crate::estimate::{Options, estimate};

/// Multiplies all efficiencies of the accelerator by one factor, so that the measured steps (in seconds) are predicted
/// correctly on average. On cores, gaps between operations and starts of matmuls are work of the same cores and change by
/// the same factor; a GPU waits for its host, whose speed is another one.
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
    let mut accelerator =
        Accelerator { matmul, attention, stream: device.stream * factor, ..device.clone() };
    // Measured attention does not use the rates above.
    match (&mut accelerator.efficiency, accelerator.attention_rates.is_empty()) {
        (_, false) => accelerator.attention_rates.scale(factor),
        (Some(efficiency), true) => efficiency.scale(OpClass::Attention, factor),
        (None, true) => {}
    }
    if cluster.cores.is_some() {
        accelerator.kernel_gap_us /= factor;
        accelerator.kernel_us /= factor;
        accelerator.launch_us /= factor;
        accelerator.short_kernel_us.0.iter_mut().for_each(|(_, us)| *us /= factor);
        accelerator.step_us /= factor;
        if let Some(MatmulOverheads { f32, bf16, .. }) = &mut accelerator.matmul.overheads {
            f32.start_us /= factor;
            bf16.start_us /= factor;
        }
    }
    Cluster { accelerator, ..cluster.clone() }
}
