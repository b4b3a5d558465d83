//! Learning rate and warm-up for a larger global batch. Rules of thumb with their sources; they do not replace a short
//! sweep.

use lockstep_plan::Plan;

/// Critical batch size in tokens: above it, larger batches no longer save steps in proportion. A few million for
/// language models at typical losses (McCandlish et al. 2018, Kaplan et al. 2020).
const CRITICAL: f64 = 4e6;

/// A batch size and the hyperparameters that go with it.
#[derive(Clone, PartialEq, Debug)]
pub struct BatchRemarks {
    pub global_batch: usize,
    pub lr: f64,
    pub warmup: usize,
    pub lines: Vec<String>,
}

/// Recommended changes for a run with `global_batch` sequences per step.
///
/// Adam's step size does not depend on the scale of the gradient, so a larger batch only reduces noise: the learning rate
/// scales with the square root of the batch (Malladi et al. 2022). Warm-up covers the same number of tokens, so it takes
/// fewer steps, but at least 100, in which the moments settle.
pub fn batch_remarks(plan: &Plan, global_batch: usize) -> Option<BatchRemarks> {
    let times = global_batch as f64 / plan.train.global_batch as f64;
    let tokens = (global_batch * plan.data.seq) as f64;
    let mut lines = Vec::new();
    let warmup =
        ((plan.train.lr.warmup as f64 / times).ceil() as usize).max(plan.train.lr.warmup.min(100));
    let lr = plan.train.lr.peak * times.sqrt();
    if times > 1.0 {
        lines.push(format!(
            "global batch {global_batch} instead of {}: use lr {:.2e} instead of {:.2e} (square-root scaling for Adam)",
            plan.train.global_batch, lr, plan.train.lr.peak
        ));
        lines.push(format!(
            "for the same number of tokens, use {warmup} warm-up steps instead of {}, and {} steps instead of {}",
            plan.train.lr.warmup,
            (plan.train.steps as f64 / times).ceil(),
            plan.train.steps
        ));
    }
    if tokens > CRITICAL {
        lines.push(format!(
            "{:.1}M tokens per step is above the critical batch size of a few million tokens;",
            tokens / 1e6
        ));
        lines.push(
            "increase the batch during training, or expect to need more tokens for the same loss"
                .into(),
        );
    }
    (!lines.is_empty()).then_some(BatchRemarks { global_batch, lr, warmup, lines })
}
