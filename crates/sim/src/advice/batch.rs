//! What to think of when the global batch grows: learning rate and warm-up. Rules of thumb, each with its source; no
//! rule replaces a short sweep.

use lockstep_plan::Plan;

/// Tokens of a step above which more of them stop to save steps in proportion: the critical batch of language models of
/// usual losses, a few million (McCandlish et al. 2018, Kaplan et al. 2020).
const CRITICAL: f64 = 4e6;

/// The batch that would fill a cluster, and what it asks for.
#[derive(Clone, PartialEq, Debug)]
pub struct BatchRemarks {
    pub global_batch: usize,
    pub lr: f64,
    pub warmup: usize,
    pub lines: Vec<String>,
}

/// What a run with `global_batch` sequences per step should change, if that is more than it has now.
///
/// Adam's step does not grow with the gradient, so its noise is what a larger batch takes away: the learning rate goes
/// with the square root of the batch (Malladi et al. 2022). Warm-up counts tokens, so that it takes fewer steps, but not
/// fewer than some hundred, in which the moments settle.
pub fn batch_remarks(plan: &Plan, global_batch: usize) -> Option<BatchRemarks> {
    let times = global_batch as f64 / plan.train.global_batch as f64;
    let tokens = (global_batch * plan.data.seq) as f64;
    let mut lines = Vec::new();
    let warmup =
        ((plan.train.lr.warmup as f64 / times).ceil() as usize).max(plan.train.lr.warmup.min(100));
    let lr = plan.train.lr.peak * times.sqrt();
    if times > 1.0 {
        lines.push(format!(
            "a global batch of {global_batch} instead of {}: lr {:.2e} instead of {:.2e} (by the square root, for Adam)",
            plan.train.global_batch, lr, plan.train.lr.peak
        ));
        lines.push(format!(
            "warm-up over the same tokens: {warmup} steps instead of {}; steps: {} instead of {}",
            plan.train.lr.warmup,
            (plan.train.steps as f64 / times).ceil(),
            plan.train.steps
        ));
    }
    if tokens > CRITICAL {
        lines.push(format!(
            "{:.1}M tokens per step are above the few million at which larger batches stop to save steps;",
            tokens / 1e6
        ));
        lines.push(
            "grow it during training, or expect to need more tokens for the same loss".into(),
        );
    }
    (!lines.is_empty()).then_some(BatchRemarks { global_batch, lr, warmup, lines })
}
