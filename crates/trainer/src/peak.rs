//! Peak matrix multiply rate of this machine, the denominator of MFU.

use std::time::{Duration, Instant};

use lockstep_kernels::{Device, Dtype, Matmul, Tag};

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
