//! Peak matrix multiply rate of this machine, the denominator of MFU.

use std::time::{Duration, Instant};

use lockstep_kernels::{Device, Dtype, Matmul, Tag};

/// FLOP/s of the fastest of up to 12 matrix multiplies of size 1024³.
pub fn measure_peak(device: &Device, dtype: Dtype) -> f64 {
    const SIDE: usize = 1024;
    // Several tries, because other processes may slow down some of them; fewer on slow devices.
    const TRIES: usize = 12;
    const TIME_LIMIT: Duration = Duration::from_millis(250);
    let operand = || device.zeros(SIDE, SIDE, dtype, Tag::Buffers);
    let (a, b, mut out) = (operand(), operand(), operand());
    let begun = Instant::now();
    let best = (0..TRIES)
        .take_while(|tries| *tries < 2 || begun.elapsed() < TIME_LIMIT)
        .map(|_| {
            let start = device.record();
            device.matmul(Matmul::linear(a.view(), b.view(), out.view_mut()));
            device.record().elapsed_since(&start).as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * (SIDE * SIDE * SIDE) as f64 / best
}
