//! What this machine's matrix multiply reaches: the measure of a step's efficiency.

use std::time::{Duration, Instant};

use lockstep_kernels::{Device, Dtype, Matmul, Tag};

/// Operations per second of the best of a few multiplies of 1024³ on this device.
pub fn measure_peak(device: &Device, dtype: Dtype) -> f64 {
    const SIDE: usize = 1024;
    // Enough that a busy neighbour does not sit on all of them; fewer where they are slow.
    const TRIES: usize = 12;
    const PATIENCE: Duration = Duration::from_millis(250);
    let operand = || device.zeros(SIDE, SIDE, dtype, Tag::Buffers);
    let (a, b, mut out) = (operand(), operand(), operand());
    let begun = Instant::now();
    let best = (0..TRIES)
        .take_while(|tries| *tries < 2 || begun.elapsed() < PATIENCE)
        .map(|_| {
            let start = Instant::now();
            device.matmul(Matmul::linear(a.view(), b.view(), out.view_mut()));
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * (SIDE * SIDE * SIDE) as f64 / best
}
