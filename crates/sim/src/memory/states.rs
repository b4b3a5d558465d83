//! Parameters, gradients and optimizer, as ZeRO's stage leaves them on a rank.

use super::MemoryEstimate;
use crate::case::Case;
use crate::software::Software;

/// Bytes of weights, gradients and optimizer of `params` parameters at a ZeRO stage among `shard` ranks.
///
/// ```
/// use lockstep_sim::{Software, states};
///
/// // ZeRO's own example: 7.5 billion parameters on 64 ranks, 16 bytes each.
/// let zero = Software { weights: 2.0, gradients: 2.0, optimizer: 12.0, ..Software::lockstep() };
/// let gigabytes = |stage| states(&zero, 7.5e9, stage, 64.0).iter().sum::<f64>() / 1e9;
/// assert_eq!([0, 1, 2, 3].map(|stage| format!("{:.1}", gigabytes(stage))), ["120.0", "31.4", "16.6", "1.9"]);
/// ```
pub fn states(software: &Software, params: f64, zero: u8, shard: f64) -> [f64; 3] {
    cut([software.weights, software.gradients, software.optimizer], params, zero, shard)
}

/// The same of so many bytes of each.
fn cut([weights, gradients, optimizer]: [f64; 3], params: f64, zero: u8, shard: f64) -> [f64; 3] {
    let cut = |from: u8| if zero >= from { shard } else { 1.0 };
    [params * weights / cut(3), params * gradients / cut(2), params * optimizer / cut(1)]
}

/// The states of a rank of the pipeline, what ZeRO-3 gathers, and buffers.
pub(super) fn held(case: &Case, pipe: usize) -> MemoryEstimate {
    let (software, zero) = (case.software(), case.layout().zero);
    let [dense, expert] = case.rank_params(pipe);
    let shard = case.mesh.shard as f64;
    let [weights, optimizer] = case.state_bytes();
    let each = [weights, software.gradients, optimizer];
    let of_dense = cut(each, dense, zero, shard);
    let of_experts = cut(each, expert, zero, case.mesh.expert_shard() as f64);
    let [parameters, gradients, optimizer] = [0, 1, 2].map(|at| of_dense[at] + of_experts[at]);
    let of = |case: &Case| case.layer_params().iter().sum::<f64>();
    let layer = case.lead().map_or(0.0, |lead| of(&lead)).max(of(case));
    let table = case.vocab * case.dim;
    let ends = pipe == 0 || pipe + 1 == case.pipe();
    let largest = if ends { layer.max(table) } else { layer };
    let gathered = match (zero, case.layout().keep_gathered) {
        (3, false) => (layer + largest) * case.width,
        (3, true) => (dense + expert) * case.width,
        _ => 0.0,
    };
    // With ZeRO-2 and 3 the gradients of a block exist whole until they are summed; those of all blocks, where
    // blocks stay whole for several micro-batches.
    let whole = match (zero, case.layout().keep_gathered && case.micros() > 1) {
        (0 | 1, _) => 0.0,
        (3, true) => (dense + expert) * software.gradients,
        _ => largest * software.gradients,
    };
    // One of each shape of matrix, and of the table on the stages that have it.
    let spare = match software.spare_gradients {
        true => spare(case, pipe) + if pipe + 1 == case.pipe() { table * case.width } else { 0.0 },
        false => 0.0,
    };
    MemoryEstimate {
        parameters,
        gradients,
        optimizer,
        gathered,
        buffers: whole + spare + software.buffers_gib * crate::cluster::GIB,
        ..MemoryEstimate::default()
    }
}

/// A gradient of every shape of matrix that a rank of the pipeline has: all experts' are alike.
fn spare(case: &Case, pipe: usize) -> f64 {
    let stages = (0..case.layout().chunks).map(|chunk| chunk * case.pipe() + pipe);
    let leads = stages.clone().any(|stage| case.kinds(stage)[1] > 0);
    let others = stages.into_iter().any(|stage| case.kinds(stage)[0] > 0);
    let [dense, _] = case.layer_params();
    let expert = case.moe.map_or(0.0, |_| case.feed_forward_params());
    let layer = if others { dense + expert } else { 0.0 };
    let lead = case.lead().filter(|_| leads);
    let attention = if others { 0.0 } else { case.attention_params() };
    (layer + lead.map_or(0.0, |lead| attention + lead.feed_forward_params())) * case.width
}
