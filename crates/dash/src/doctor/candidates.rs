//! Changes of the run file that attack a bottleneck, before they are estimated.

use lockstep_plan::model::Family;
use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Compression, DeviceType, Plan, Recompute};
use lockstep_types::Dtype;

use super::advice::MIN_SHARE;
use super::limits::{Cause, Limit};
use super::measured::Measured;

/// A rank that sends at least this many bytes per step uses a network; data in shared memory is accessed in place.
const NETWORK_BYTES: u64 = 256 << 10;

/// A change of the run file, before it is estimated.
pub(super) struct Candidate {
    pub title: &'static str,
    pub sets: Vec<String>,
    pub why: &'static str,
    pub changes_training: bool,
}

/// Changes that attack a bottleneck of the run. An axis is added only if it removes the present one.
pub(super) fn candidates(plan: &Plan, measured: &Measured, limits: &[Limit]) -> Vec<Candidate> {
    let share = |of: fn(&Cause) -> bool| -> f64 {
        limits.iter().filter(|limit| of(&limit.cause)).map(|limit| limit.share).sum()
    };
    let data = share(|cause| matches!(cause, Cause::Communication { axis } if axis == "data"));
    let inside = share(|cause| matches!(cause, Cause::Communication { axis } if axis != "data"));
    let bubble = share(|cause| *cause == Cause::Bubble);
    let compute = share(|cause| matches!(cause, Cause::Compute | Cause::MemoryBandwidth));
    let (layout, train, comm) = (&plan.layout, &plan.train, &plan.comm);
    let mut found: Vec<Candidate> = Vec::new();
    let mut add = |title, sets: &[String], why, changes_training| {
        found.push(Candidate { title, sets: sets.to_vec(), why, changes_training });
    };
    if data >= MIN_SHARE {
        let mb = comm.bucket_bytes as f64 / 1048576.0;
        add(
            "larger gradient buckets",
            &[format!("comm.bucket_mb={}", (mb * 8.0).max(1.0))],
            "fewer, larger reductions pay the latency less often",
            false,
        );
        // Ranks that share memory move data with the cores that compute; there overlap gains nothing.
        if comm.overlap.data || measured.bytes_sent >= NETWORK_BYTES {
            add(
                "overlap gradient reduction with the backward pass",
                &[format!("comm.overlap={}", !comm.overlap.data)],
                "communication that runs next to compute is not exposed",
                false,
            );
        }
        if layout.zero > 1 {
            add(
                "a lower ZeRO level",
                &[format!("layout.zero={}", layout.zero - 1)],
                "fewer synchronizations, for more memory",
                false,
            );
        }
        if train.micro_batch < train.global_batch / layout.data && layout.zero > 1 {
            add(
                "larger micro-batches, fewer reductions",
                &[format!("train.micro_batch={}", 2 * train.micro_batch)],
                "ZeRO 2 and 3 communicate in every micro-batch",
                false,
            );
        }
        if comm.compression == Compression::None && plan.precision.gradients == Dtype::F32 {
            add(
                "compress gradients to bf16",
                &["comm.compression=bf16".into()],
                "half of the bytes, with error feedback",
                true,
            );
            add(
                "sum gradients in bf16",
                &["precision.gradients=bf16".into()],
                "half of the bytes and memory of gradients, at less precision",
                true,
            );
        }
    }
    if bubble >= MIN_SHARE && layout.pipe > 1 {
        for kind in ScheduleKind::ALL.into_iter().filter(|kind| *kind != layout.schedule) {
            let chunks = if kind == ScheduleKind::Interleaved { 2 } else { 1 };
            add(
                "another pipeline schedule",
                &[format!("layout.schedule={kind}"), format!("layout.chunks={chunks}")],
                "a smaller bubble",
                false,
            );
        }
        if train.micro_batch > 1 {
            add(
                "smaller micro-batches",
                &[format!("train.micro_batch={}", train.micro_batch / 2)],
                "more micro-batches in flight fill the pipeline",
                false,
            );
        }
        add(
            "fewer pipeline stages, more replicas",
            &[
                format!("layout.pipe={}", layout.pipe / 2),
                format!("layout.data={}", layout.data * 2),
            ],
            "stages wait for each other more than replicas do",
            false,
        );
    }
    if inside >= MIN_SHARE && layout.tensor > 1 {
        add(
            "fewer tensor ranks, more replicas",
            &[
                format!("layout.tensor={}", layout.tensor / 2),
                format!("layout.data={}", layout.data * 2),
            ],
            "tensor parallelism communicates inside every layer",
            false,
        );
    }
    if inside >= MIN_SHARE && layout.context > 1 {
        add(
            "fewer context ranks, more replicas",
            &[
                format!("layout.context={}", layout.context / 2),
                format!("layout.data={}", layout.data * 2),
            ],
            "context parallelism communicates in every attention",
            false,
        );
    }
    if data + inside >= MIN_SHARE {
        placements(plan, &mut add);
    }
    // Of the time that the host gives to the run.
    let outside = share(|cause| matches!(cause, Cause::BusyHost | Cause::Straggler { .. }));
    if compute >= 0.3 * (1.0 - outside) {
        compute_candidates(plan, &mut add);
    }
    found
}

/// Placements with another innermost axis, whose ranks share a host. On one host they make no difference.
fn placements(plan: &Plan, add: &mut impl FnMut(&'static str, &[String], &'static str, bool)) {
    let order = &plan.layout.order;
    let mesh = plan.mesh();
    for axis in order.iter().filter(|axis| mesh.size(**axis) > 1 && order.last() != Some(axis)) {
        let mut changed: Vec<&str> =
            order.iter().filter(|other| *other != axis).map(|axis| axis.name()).collect();
        changed.push(axis.name());
        add(
            "another placement",
            &[format!("layout.placement={}", changed.join(","))],
            "the axis that communicates most belongs inside a host",
            false,
        );
    }
}

/// Changes that reduce compute.
fn compute_candidates(
    plan: &Plan,
    add: &mut impl FnMut(&'static str, &[String], &'static str, bool),
) {
    let (layout, train) = (&plan.layout, &plan.train);
    for how in [Recompute::None, Recompute::Selective] {
        let less = match layout.recompute {
            Recompute::None => false,
            Recompute::Cheap => how == Recompute::None && plan.device.kind == DeviceType::Cuda,
            Recompute::Selective => how == Recompute::None,
            Recompute::Full => true,
        };
        if less {
            let word = if how == Recompute::None { "none" } else { "selective" };
            add(
                "recompute less",
                &[format!("layout.recompute={word}")],
                "there is memory to keep more activations",
                false,
            );
        }
    }
    if train.micro_batch < train.global_batch / layout.data {
        add(
            "larger micro-batches",
            &[format!("train.micro_batch={}", 2 * train.micro_batch)],
            "larger matrix products are more efficient; the global batch stays the same",
            false,
        );
    }
    if layout.zero == 0 && layout.data > 1 && plan.model.family != Family::Moe {
        add(
            "shard the optimizer",
            &["layout.zero=1".into()],
            "each replica updates its part of the parameters",
            false,
        );
    }
    if plan.precision.compute == Dtype::F32 {
        add(
            "compute in bf16",
            &["precision.compute=bf16".into()],
            "matrix products are faster and activations take half the memory; master weights stay f32",
            true,
        );
    }
}
