//! The learning rate of a step, as a pure function of its number.

use crate::config::Curve;
use serde::{Deserialize, Serialize};

/// The learning rate over a whole run: any step's can be asked for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LearningRate {
    pub peak: f64,
    /// Reached at the last step.
    pub min: f64,
    /// Reaches the peak at this step.
    pub warmup: usize,
    pub steps: usize,
    pub curve: Curve,
    /// The last steps, in which `wsd` falls; other curves have none.
    pub decay_steps: usize,
}

impl LearningRate {
    /// Steps count from 1 to `steps`, as in the step line: the first step of a warm-up of 100 takes a
    /// hundredth of the peak, the last step of all takes `min`. What comes after goes on with `min`.
    ///
    /// # Panics
    /// At step 0, which there is not.
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

    /// How far `step` is from `start` to the last step: 0 to 1.
    fn progress(&self, step: usize, start: usize) -> f64 {
        if step <= start {
            return 0.0;
        }
        ((step - start) as f64 / self.steps.saturating_sub(start).max(1) as f64).min(1.0)
    }

    /// Between `min` at 0 and the peak at 1, both exactly.
    fn fall(&self, height: f64) -> f64 {
        self.peak * height + self.min * (1.0 - height)
    }
}
