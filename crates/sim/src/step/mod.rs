//! The time of one optimizer step: passes of stages in the order of the schedule, then reductions, norm and optimizer.
//! Equal replicas are walked once.

mod after;
mod bound;
mod inside;
mod replicas;

use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Collective, GroupKind, Phase};

use crate::case::Case;
use crate::clock::{PassTimes, finish_times};
use crate::comm::{Flow, Flows};
use crate::compute::{ByClass, Cost, OpClass, Passes};
use crate::estimate::Time;
use after::After;
pub(crate) use bound::{Blocks, bound, compute_bound, passes_bound};
use inside::Inside;
use replicas::{Speed, speeds};

/// The time of a step, and of a micro-batch by rank of the pipeline.
pub(crate) struct Step {
    pub seconds: f64,
    pub time: Time,
    pub forward: Vec<f64>,
    pub input: Vec<f64>,
    pub weights: Vec<f64>,
    pub busy: Vec<f64>,
    pub flows: Vec<Flow>,
    /// FLOPs of all ranks.
    pub flops: f64,
    /// FLOPs of the rank that `time` describes.
    pub rank_flops: f64,
    /// Compute seconds of that rank by class of operation.
    pub by: ByClass,
}

pub(crate) fn step(case: &Case) -> Step {
    let mut flows = Flows::new(case.cluster);
    let inside = Inside::new(case, &mut flows);
    let blocks = Blocks::of(case);
    let stages: Vec<Passes> = (0..case.stages()).map(|stage| blocks.stage(case, stage)).collect();
    let send = send(case, &mut flows);
    let after = After::new(case, &mut flows);
    let costs = Costs { stages: &stages, inside: &inside, after: &after, send };
    // The slowest replica, starting with one at full speed.
    let mut slowest = walk(case, &costs, &Speed::whole(case.pipe()));
    if !case.cluster.even() {
        let (even, seconds, rank) = (slowest.time, slowest.seconds, slowest.rank);
        for speed in speeds(case) {
            let other = walk(case, &costs, &speed);
            if other.seconds > slowest.seconds {
                slowest = other;
            }
        }
        let straggling = even.straggling + slowest.seconds - seconds;
        slowest = Walked { rank, time: Time { straggling, ..even }, ..slowest };
    }
    let of_rank = |rank: usize| -> f64 {
        let flops = |passes: &Passes| {
            passes.forward.flops + passes.again.flops + passes.input.flops + passes.weights.flops
        };
        let micro: f64 = stages.iter().skip(rank).step_by(case.pipe()).map(flops).sum();
        micro * case.micros() as f64
    };
    let Walked { seconds, rank, time, forward, input, weights, busy, by } = slowest;
    let replica: f64 = (0..case.pipe()).map(of_rank).sum();
    let flops = replica * (case.plan.ranks / case.pipe()) as f64;
    let (flows, rank_flops) = (flows.list, of_rank(rank));
    Step { seconds, time, forward, input, weights, busy, flows, flops, rank_flops, by }
}

/// Seconds of a message between stages.
fn send(case: &Case, flows: &mut Flows) -> f64 {
    if case.pipe() == 1 {
        return 0.0;
    }
    let cut = case.layout().sequence || case.software().pipe_cut;
    let rows = if cut { case.tokens / case.mesh.tensor as f64 } else { case.tokens };
    let bytes = rows * case.dim * case.width;
    let times = (case.micros() * case.layout().chunks) as f64;
    let kind = (GroupKind::Pipe, case.pipeline());
    // The first stage sends no gradient.
    let message = flows.add(kind, Collective::SendRecv, Phase::Forward, bytes, times);
    let back = times - case.micros() as f64;
    flows.add(kind, Collective::SendRecv, Phase::Backward, bytes, back);
    // Messages that are cut among tensor ranks are gathered by the receivers, except with sequence parallelism.
    let together = case.software().pipe_cut && !case.layout().sequence;
    let whole = if together { bytes * case.mesh.tensor as f64 } else { 0.0 };
    let kind = (GroupKind::Tensor, case.tensor());
    message + flows.add(kind, Collective::AllGather, Phase::Forward, whole, 2.0 * times)
}

/// Costs that all replicas share.
struct Costs<'a> {
    stages: &'a [Passes],
    inside: &'a Inside,
    after: &'a After,
    /// Seconds of a message between stages.
    send: f64,
}

struct Walked {
    seconds: f64,
    /// The busiest rank of the pipeline, which `time` and `by` describe.
    rank: usize,
    time: Time,
    forward: Vec<f64>,
    input: Vec<f64>,
    weights: Vec<f64>,
    busy: Vec<f64>,
    by: ByClass,
}

/// The time of one pass of one stage, and its parts.
#[derive(Clone, Copy, Default)]
struct Pass {
    seconds: f64,
    compute: f64,
    host: f64,
}

/// A pass with `waits` seconds of exposed communication, limited by the device or by the host that launches its kernels.
/// Launching a collective takes the host about as long as a small one takes, so neither overlaps with the other. On CPUs
/// the gap between kernels is added to both.
///
/// On the device some kernels are short, and the time of others is that of their work. The root of the sum of squares is
/// within a tenth of what models with a hidden size of 128 to 512 took on an H200; the larger of both was up to 18% too low.
fn pass(case: &Case, cost: Cost, waits: f64, speed: f64) -> Pass {
    let device = &case.cluster.accelerator;
    let compute = cost.seconds / speed;
    let short = cost.kernels * device.short_kernel(case.tokens);
    let launches = cost.kernels * device.launch_us * 1e-6;
    let gaps = cost.kernels * device.kernel_gap_us * 1e-6;
    let host = compute.hypot(short).max(launches) - compute + gaps;
    Pass { seconds: compute + waits + host, compute, host }
}

/// Seconds of copying the activations of a stage and micro-batch in one direction. Copies overlap with the pass.
fn offloaded_activations(case: &Case) -> f64 {
    if !case.offloads().activations() {
        return 0.0;
    }
    let layers = case.shape().layers as f64 / case.stages() as f64;
    let [saved, _] = crate::memory::Layers::of(case).saved;
    (layers - 1.0).max(0.0) * saved / case.cluster.accelerator.host_link_gbs * 1e-9
}

/// Walks one replica through a step. The time breakdown is that of the busiest rank: the others wait for it.
fn walk(case: &Case, costs: &Costs, speed: &Speed) -> Walked {
    let Costs { stages, inside, after, send } = *costs;
    let (pipe, micros) = (case.pipe(), case.micros() as f64);
    let mut sums = vec![Time::default(); pipe];
    let mut kinds = vec![ByClass::default(); pipe];
    let (mut forward, mut input, mut weights) = (vec![0.0; pipe], vec![0.0; pipe], vec![0.0; pipe]);
    // Without overlap ranks are busy with a message until it has arrived.
    let (hand, send) = if case.software().pipe_overlap { (0.0, send) } else { (send, 0.0) };
    let mut lasts = PassTimes { send, ..PassTimes::default() };
    // Seconds that activations of a stage need to the host, and back.
    let moved = offloaded_activations(case);
    for (stage, passes) in stages.iter().enumerate() {
        let rank = stage % pipe;
        let (compute, link) = (speed.compute[rank], speed.link[rank]);
        let waits = inside.waits(case, passes, stage);
        let mut there = pass(case, passes.forward, waits.forward / link, compute);
        let mut back = pass(case, passes.again + passes.input, waits.input / link, compute);
        there.seconds = there.seconds.max(moved);
        back.seconds = back.seconds.max(moved);
        let last = pass(case, passes.weights, 0.0, compute);
        lasts.forward.push(there.seconds + hand);
        lasts.input.push(back.seconds + hand);
        lasts.weights.push(last.seconds);
        forward[rank] += there.seconds;
        input[rank] += back.seconds;
        weights[rank] += last.seconds;
        let all = passes.forward + passes.again + passes.input + passes.weights;
        let by = &mut kinds[rank];
        *by = std::array::from_fn(|kind| by[kind] + micros * all.by[kind] / compute);
        let sum = &mut sums[rank];
        sum.compute += micros * (there.compute + back.compute + last.compute);
        sum.host += micros * (there.host + back.host + last.host);
        sum.tensor += micros * waits.tensor / link;
        sum.context += micros * waits.context / link;
        sum.expert += micros * waits.expert / link;
        sum.data += micros * waits.data / link;
    }
    let kind = if pipe == 1 { ScheduleKind::OneForwardOneBackward } else { case.layout().schedule };
    let mut ends = finish_times(kind, pipe, case.micros(), &lasts);
    let on_one_device = case.cluster.engine.shares_accelerator();
    if on_one_device {
        ends = ends.on_one_device();
    }
    // Reductions, then all ranks wait for the norm, then each updates its parameters.
    let slow = speed.slowest_link;
    let mut reduced: f64 = 0.0;
    for (rank, sum) in sums.iter_mut().enumerate() {
        let exposed = after.exposed(case, rank, input[rank] + weights[rank], send) / slow;
        reduced = reduced.max(ends.last[rank] + exposed);
        sum.data += exposed + after.gather(rank) / slow;
        sum.optimizer = match case.offloads().optimizer() {
            false => after.step(rank) / speed.compute[rank],
            // Overlapped with the forward pass of the first micro-batch, except for the first block.
            true => {
                let (update, blocks) = (after.step(rank), (case.layers(rank) + 1) as f64);
                (update - forward[rank]).max(update / blocks)
            }
        };
    }
    if on_one_device {
        let (time, by) = (Time::mean(&sums), mean(&kinds));
        sums.fill(time);
        kinds.fill(by);
    }
    let stepped = sums.iter().map(|sum| sum.optimizer).fold(0.0, f64::max);
    let gather = (0..pipe).map(|rank| after.gather(rank) / slow).fold(0.0, f64::max);
    let busiest = (0..pipe).max_by(|a, b| sums[*a].total().total_cmp(&sums[*b].total()));
    let rank = busiest.expect("a pipeline has a rank");
    // Ranks that share cores do not arrive at a collective at the same time.
    let mut time = sums[rank];
    // The host begins the next step while the device updates the parameters.
    let between = (1e-6 * case.cluster.accelerator.step_us - stepped).max(0.0);
    time.host += between;
    let busy = time.compute + time.host + time.optimizer;
    let late = busy * case.cluster.skew.at(busy).unwrap_or(0.0);
    time.straggling = if case.plan.ranks > 1 { late } else { 0.0 };
    let seconds = reduced + stepped + gather + between + time.straggling;
    time.bubble = seconds - time.total();
    let mut by = kinds[rank];
    by[OpClass::Optimizer as usize] += time.optimizer;
    Walked { seconds, rank, time, forward, input, weights, busy: ends.busy, by }
}

/// The mean over ranks, by class.
fn mean(kinds: &[ByClass]) -> ByClass {
    let sum = |kind: usize| kinds.iter().map(|by| by[kind]).sum::<f64>();
    std::array::from_fn(|kind| sum(kind) / kinds.len() as f64)
}
