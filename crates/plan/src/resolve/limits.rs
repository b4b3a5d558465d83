//! Limits of a run, so that no later calculation overflows and no list of ranks or passes exhausts the memory.

use super::checker::Checker;
use crate::model::Shape;
use crate::plan::{Data, Layout, Train};

/// Maximum number of ranks.
pub(super) const MAX_RANKS: usize = 1_000_000;

/// Maximum number of compute threads of a rank.
pub(super) const MAX_THREADS: usize = 4096;

/// Maximum number of passes of all pipeline stages in a step, and of passes through layers on one rank. Both are lists
/// in memory.
const MAX_PASSES: f64 = 2e6;

/// Maximum size of the activations of a step in bytes, over all ranks.
const MAX_ACTIVATIONS: f64 = 1e18;

/// Checks the size of a step. The layout fits the model.
pub(super) fn step(
    checker: &mut Checker,
    layout: &Layout,
    shape: &Shape,
    data: &Data,
    train: &Train,
) {
    let float = |size: usize| size as f64;
    let micros = float(train.accumulation);
    let stages = micros * float(layout.pipe) * float(layout.chunks);
    let layers = micros * (float(shape.layers) / float(layout.pipe)).ceil();
    if stages.max(layers) > MAX_PASSES {
        let message = format!(
            "a step has {} micro-batches, which take {:.1e} passes",
            train.accumulation,
            stages.max(layers)
        );
        let keys = ["train.global_batch", "train.micro_batch", "layout.pipe", "model.layers"];
        checker.add(
            &keys,
            message,
            format!(
                "the maximum is {MAX_PASSES:e}; use a larger micro_batch or a smaller global_batch"
            ),
        );
    }
    let moe = shape.moe.map_or(1.0, |moe| float(moe.top_k) + float(moe.shared));
    let experts = shape.moe.map_or(0.0, |moe| float(moe.experts));
    let width = 8.0 * float(shape.dim)
        + 3.0 * float(shape.ffn) * moe
        + 4.0 * float(shape.qkv_dim())
        + 2.0 * experts;
    let bytes = 4.0 * float(train.global_batch) * float(data.seq) * float(shape.layers) * width;
    if bytes > MAX_ACTIVATIONS {
        let message = format!("a step has {bytes:.1e} bytes of activations");
        let keys = ["train.global_batch", "data.seq", "model.seq", "model.dim"];
        checker.add(&keys, message, format!("the maximum is {MAX_ACTIVATIONS:e}"));
    }
}
