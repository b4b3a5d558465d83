//! Peak matrix multiply rate of this machine, the denominator of MFU.

use std::time::{Duration, Instant};

use lockstep_kernels::{Device, DeviceType, Dtype, Matmul, RandomKey, Tag};

/// The peak rate as known so far. Measured on a busy machine it is too low, so it is measured again when training
/// exceeds it; a rate that was reached is never above the peak.
#[derive(Clone, Copy, Debug)]
pub struct PeakRate(f64);

impl PeakRate {
    pub fn new(measured: f64) -> PeakRate {
        PeakRate(measured)
    }

    pub fn flops_per_s(&self) -> f64 {
        self.0
    }

    /// Raises the peak if a rank has `reached` more FLOP/s.
    pub fn raise_to(&mut self, reached: f64, measure_again: impl FnOnce() -> f64) {
        if reached > self.0 {
            self.0 = reached.max(measure_again());
        }
    }
}

/// Side of the square matrices of the peak rate. A GPU reaches its peak only with large ones.
fn peak_side(device: DeviceType) -> usize {
    match device {
        DeviceType::Cpu => 1024,
        DeviceType::Cuda => 4096,
    }
}

/// FLOP/s of the fastest of up to 12 multiplies of large square matrices.
pub fn measure_peak(device: &Device, dtype: Dtype) -> f64 {
    let side = peak_side(device.device_type());
    // Several tries, because other processes may slow down some of them; fewer on slow devices.
    const TRIES: usize = 12;
    const TIME_LIMIT: Duration = Duration::from_millis(250);
    // Random numbers: a GPU multiplies zeros faster, because they take less power.
    let operand = |stream| {
        let mut operand = device.empty(side, side, dtype, Tag::Buffers);
        device.normal(operand.view_mut(), RandomKey { seed: 0, stream }, 0, 1.0);
        operand
    };
    let (a, b, mut out) = (operand(0), operand(1), operand(2));
    let begun = Instant::now();
    let best = (0..TRIES)
        .take_while(|tries| *tries < 2 || begun.elapsed() < TIME_LIMIT)
        .map(|_| {
            let start = device.record();
            device.matmul(Matmul::linear(a.view(), b.view(), out.view_mut()));
            device.record().elapsed_since(&start).as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * (side as f64).powi(3) / best
}

#[cfg(test)]
mod tests {
    use super::PeakRate;

    #[test]
    fn a_peak_measured_under_load_is_raised() {
        let mut peak = PeakRate::new(100.0);
        peak.raise_to(90.0, || unreachable!("the peak is plausible"));
        peak.raise_to(150.0, || 300.0);
        assert_eq!(peak.flops_per_s(), 300.0);
        // Still busy: no rate is above the peak.
        peak.raise_to(320.0, || 200.0);
        assert_eq!(peak.flops_per_s(), 320.0);
    }
}
