//! Parameters, gradients and optimizer state of a rank, as the reduction policy shards them.

use lockstep_plan::reduction::Gather;

use super::MemoryEstimate;
use crate::case::Case;
use crate::software::Software;

/// Bytes of weights, gradients and optimizer state of `params` parameters, sharded across `shard` ranks at a level of the
/// ZeRO paper, without temporary buffers.
///
/// ```
/// use lockstep_sim::{Software, states};
///
/// // The example of the ZeRO paper: 7.5 billion parameters with 16 bytes each, on 64 ranks.
/// let zero = Software { weights: 2.0, gradients: 2.0, optimizer: 12.0, ..Software::lockstep() };
/// let gigabytes = |level| states(&zero, 7.5e9, level, 64.0).iter().sum::<f64>() / 1e9;
/// assert_eq!([0, 1, 2, 3].map(|level| format!("{:.1}", gigabytes(level))), ["120.0", "31.4", "16.6", "1.9"]);
/// ```
pub fn states(software: &Software, params: f64, zero: u8, shard: f64) -> [f64; 3] {
    let Software { weights, gradients, optimizer, .. } = software;
    let cut = |from: u8| if zero >= from { shard } else { 1.0 };
    [params * weights / cut(3), params * gradients / cut(2), params * optimizer / cut(1)]
}

/// States of a pipeline rank, blocks gathered by ZeRO-3, and buffers.
pub(super) fn states_of_rank(case: &Case, pipe: usize) -> MemoryEstimate {
    let (software, gather) = (case.software(), case.policy.gather);
    let [dense, expert] = case.rank_params(pipe);
    let [weights, optimizer] = case.state_bytes();
    let shards = [case.mesh.shard as f64, case.mesh.expert_shard() as f64];
    let bytes = |each: f64, sharded: bool| {
        let [dense_cut, expert_cut] = if sharded { shards } else { [1.0, 1.0] };
        each * (dense / dense_cut + expert / expert_cut)
    };
    let parameters = bytes(weights, gather.shards_parameters());
    let optimizer = bytes(optimizer, gather.shards_optimizer());
    // With the gradients, and a copy of the parameters on its way to the device.
    let [optimizer, host] = match case.offloads().optimizer() {
        true => {
            let more = software.gradients + case.width;
            [0.0, optimizer + bytes(more, gather.shards_optimizer())]
        }
        false => [optimizer, 0.0],
    };
    let frees_whole = case.policy.frees_whole_gradients() && !software.whole_gradients;
    let gradients = bytes(software.gradients, frees_whole);
    let of = |case: &Case| case.layer_params().iter().sum::<f64>();
    let layer = case.lead().map_or(0.0, |lead| of(&lead)).max(of(case));
    let table = case.vocab * case.dim;
    let ends = pipe == 0 || pipe + 1 == case.pipe();
    let largest = if ends { layer.max(table) } else { layer };
    let leaves = case.offloads().gradients() && case.policy.reduce.is_none() && case.micros() == 1;
    let gradients = match leaves {
        // The block that is computed, and the one before it, which is copied to the host.
        true => gradients.min(2.0 * largest * software.gradients),
        false => gradients,
    };
    let gathered = match gather {
        Gather::EveryPass => (layer + largest) * case.width,
        Gather::EveryStep => (dense + expert) * case.width,
        Gather::Never | Gather::AfterOptimizer => 0.0,
    };
    // The whole gradient of a block until it is reduced. With overlap one is reduced while the next is computed.
    let whole = match (frees_whole, case.policy.overlap) {
        (false, _) => 0.0,
        (true, overlap) => largest * software.gradients * if overlap { 2.0 } else { 1.0 },
    };
    // One buffer per matrix shape, and one for the table on the last stage.
    let spare = match software.spare_gradients {
        true => spare(case, pipe) + if pipe + 1 == case.pipe() { table * case.width } else { 0.0 },
        false => 0.0,
    };
    MemoryEstimate {
        parameters,
        gradients,
        optimizer,
        host,
        gathered,
        buffers: whole + spare + fixed_buffers(case, pipe),
        ..MemoryEstimate::default()
    }
}

/// Buffers of the program, and FP8 copies of weights: those of all layers, or of two layers if they are gathered for
/// every pass.
pub(super) fn fixed_buffers(case: &Case, pipe: usize) -> f64 {
    let weights = match case.policy.gather {
        _ if !case.fp8() => 0.0,
        Gather::EveryPass => 2.0 * case.layer_params().iter().sum::<f64>(),
        _ => case.rank_layer_params(pipe).iter().sum(),
    };
    let Software { fp8_weights, buffers_gib, .. } = case.software();
    fp8_weights * weights + buffers_gib * crate::cluster::GIB
}

/// Masters and moments in f32, of which each replica writes an equal part. Accelerators copy them to the host.
pub(super) fn snapshot(case: &Case, pipe: usize) -> f64 {
    let [dense, expert] = case.rank_params(pipe);
    let written = dense / case.replicas().members as f64;
    let of_experts = expert / case.same_experts().members as f64;
    if case.cluster.cores.is_some() { 12.0 * (written + of_experts) } else { 0.0 }
}

/// One gradient buffer per matrix shape of a pipeline rank. All experts have the same shape.
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
