//! Learning rate schedules: pure functions of the step number.

use crate::config::Curve;
use serde::{Deserialize, Serialize};

/// Learning rate schedule of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LearningRate {
    pub peak: f64,
    /// Value at the last step.
    pub min: f64,
    /// Step at which the peak is reached.
    pub warmup: usize,
    pub steps: usize,
    pub curve: Curve,
    /// Length of the final decay of `wsd`; 0 for other curves.
    pub decay_steps: usize,
}

impl LearningRate {
    /// Learning rate of a step. Steps are counted from 1: the first step of a warm-up of 100 uses 1/100 of the peak.
    /// The last step and all later ones use `min`.
    ///
    /// # Panics
    /// If `step` is 0.
    pub fn at(&self, step: usize) -> f64 {
        assert!(step > 0, "steps count from 1");
        if step < self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        match self.curve {
            Curve::Constant => self.peak,
            Curve::Linear => self.fall(1.0 - self.progress(step, self.warmup)),
            Curve::Cosine => {
                let angle = std::f64::consts::PI * self.progress(step, self.warmup);
                self.fall(0.5 * (1.0 + angle.cos()))
            }
            Curve::Wsd => {
                let stable = self.warmup.max(self.steps - self.decay_steps);
                self.fall(1.0 - self.progress(step, stable))
            }
        }
    }

    /// Progress of `step` from `start` to the last step, 0 to 1.
    fn progress(&self, step: usize, start: usize) -> f64 {
        if step <= start {
            return 0.0;
        }
        ((step - start) as f64 / self.steps.saturating_sub(start).max(1) as f64).min(1.0)
    }

    /// Interpolates between `min` (at 0) and the peak (at 1), both exactly.
    fn fall(&self, height: f64) -> f64 {
        self.peak * height + self.min * (1.0 - height)
    }
}
