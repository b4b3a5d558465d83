//! Exchanges inside passes: of the tensor, context and expert axes, and of the blocks that ZeRO-3 gathers. What
//! of them nothing hides, a pass waits for.

use lockstep_plan::context::ContextKind;
use lockstep_plan::{Circle, Collective, Phase, Recompute};

use crate::case::Case;
use crate::compute::Passes;
use crate::exchange::Flows;

/// What exchanges beside the computing take from it: units that move data do not compute.
pub(super) const BESIDE: f64 = 0.1;

/// Seconds of exchanges for one layer and micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Inside {
    /// Forward, done again, and backward: those that nothing can hide, and those that weight gradients may.
    tensor: [f64; 3],
    tensor_hideable: f64,
    context: [f64; 3],
    /// Of the ring: what one round's message takes, forward and backward, behind attention.
    ring: [f64; 2],
    expert: [f64; 3],
    /// ZeRO-3: gathering a layer, and summing its gradient.
    gather: f64,
    scatter: f64,
    /// How often a layer is gathered for a micro-batch, forward and backward.
    gathers: [f64; 2],
}

/// What a stage's passes over a micro-batch wait for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waits {
    pub tensor: f64,
    pub context: f64,
    pub expert: f64,
    pub data: f64,
    forward: f64,
    input: f64,
    pub weights: f64,
}

impl Waits {
    pub fn forward(&self) -> f64 {
        self.forward
    }

    pub fn input(&self) -> f64 {
        self.input
    }
}

impl Inside {
    pub fn new(case: &Case, flows: &mut Flows) -> Inside {
        let mut inside = Inside::default();
        inside.tensor(case, flows);
        inside.context(case, flows);
        inside.expert(case, flows);
        inside.gathered(case, flows);
        inside
    }

    /// Passes of layers in a step, of the rank with the most.
    fn times(case: &Case) -> f64 {
        let layers = case.shape().layers.div_ceil(case.pipe());
        (layers * case.micros()) as f64
    }

    fn tensor(&mut self, case: &Case, flows: &mut Flows) {
        let circle = (Circle::Tensor, case.tensor());
        let bytes = case.tokens * case.dim * case.width;
        let times = Inside::times(case);
        let again = if case.layout().recompute == Recompute::Full { 2.0 } else { 0.0 };
        use Collective::{AllGather, AllReduce, ReduceScatter};
        use Phase::{Backward, Forward};
        if !case.layout().sequence {
            let sum = flows.add(circle, AllReduce, Forward, bytes, 2.0 * times);
            flows.add(circle, AllReduce, Backward, bytes, (2.0 + again) * times);
            self.tensor = [2.0 * sum, again * sum, 0.0];
            self.tensor_hideable = 2.0 * sum;
        } else {
            // What goes into a multiply in 8 bits is gathered in 8 bits.
            let narrow = if case.rate() > case.wide_rate() { bytes / case.width } else { bytes };
            let gather = flows.add(circle, AllGather, Forward, narrow, 2.0 * times);
            let scatter = flows.add(circle, ReduceScatter, Forward, bytes, 2.0 * times);
            // The gradient of each half's output, and its input once more.
            flows.add(circle, AllGather, Backward, narrow, (4.0 + again) * times);
            flows.add(circle, ReduceScatter, Backward, bytes, (2.0 + again) * times);
            self.tensor = [2.0 * (gather + scatter), again * (gather + scatter), 2.0 * gather];
            self.tensor_hideable = 2.0 * (gather + scatter);
        }
    }

    fn context(&mut self, case: &Case, flows: &mut Flows) {
        let ranks = case.mesh.context;
        if ranks == 1 {
            return;
        }
        let times = Inside::times(case);
        let again = if case.layout().recompute == Recompute::Full { 1.0 } else { 0.0 };
        let ulysses = case.mesh.ulysses;
        let (all, rounds) = (case.context(), (ranks / ulysses) as f64 - 1.0);
        let near = crate::Spread { members: ulysses, ..all };
        let heads = case.tokens * case.queries * case.width;
        let keys = 2.0 * case.tokens * case.keys * case.width;
        let circle = (Circle::Context, near);
        if case.layout().context_kind != ContextKind::Ring {
            let there =
                flows.add(circle, Collective::AllToAll, Phase::Forward, heads + keys, times)
                    + flows.add(circle, Collective::AllToAll, Phase::Forward, heads, times);
            flows.add(
                circle,
                Collective::AllToAll,
                Phase::Backward,
                heads + keys,
                (1.0 + again) * times,
            );
            flows.add(circle, Collective::AllToAll, Phase::Backward, heads, (1.0 + again) * times);
            self.context = [there, again * there, there];
        }
        if rounds > 0.0 {
            let circle = (
                Circle::Context,
                crate::Spread { members: ranks / ulysses, stride: all.stride * ulysses },
            );
            let there = flows.add(circle, Collective::Send, Phase::Forward, keys, rounds * times);
            // Keys and values once more, and their gradients in f32 with them.
            let back = flows.add(
                circle,
                Collective::Send,
                Phase::Backward,
                keys * (1.0 + 4.0 / case.width),
                (rounds + again * rounds) * times,
            );
            self.ring = [rounds * there, rounds * (back + again * there)];
        }
    }

    fn expert(&mut self, case: &Case, flows: &mut Flows) {
        let Some(moe) = case.moe else { return };
        let circle = (Circle::Expert, case.experts());
        let bytes = case.rows * moe.top_k as f64 * case.dim * case.width;
        let times = Inside::times(case);
        let again = if case.layout().recompute == Recompute::Full { 2.0 } else { 0.0 };
        let rows = flows.add(circle, Collective::AllToAllV, Phase::Forward, bytes, 2.0 * times);
        flows.add(circle, Collective::AllToAllV, Phase::Backward, bytes, (2.0 + again) * times);
        self.expert = [2.0 * rows, again * rows, 2.0 * rows];
    }

    fn gathered(&mut self, case: &Case, flows: &mut Flows) {
        if case.layout().zero < 3 {
            return;
        }
        let [dense, expert] = case.layer_params();
        let times = Inside::times(case);
        let keeps = case.layout().keep_gathered;
        let per_micro = 1.0 / case.micros() as f64;
        self.gathers = if keeps { [per_micro, 0.0] } else { [1.0, 1.0] };
        let (shard, experts) =
            ((Circle::Gather, case.shard()), (Circle::ExpertGather, case.same_experts()));
        let gathers = self.gathers[0] + self.gathers[1];
        let mut both = |collective: Collective, phase: Phase, width: f64, times: f64| {
            flows.add(shard, collective, phase, dense * width, times)
                + flows.add(experts, collective, phase, expert * width, times)
        };
        self.gather = both(Collective::AllGather, Phase::Forward, case.width, gathers * times);
        self.scatter =
            both(Collective::ReduceScatter, Phase::Backward, case.software().wire, times);
        if case.micros() > 1 && keeps {
            // Gradients are summed once where blocks stay whole.
            self.scatter *= per_micro;
        }
    }

    /// What a stage of so many layers waits for.
    pub fn waits(&self, case: &Case, passes: &Passes, layers: f64) -> Waits {
        let mut waits = Waits::default();
        let [there, again, back] = self.tensor.map(|seconds| seconds * layers);
        // Weight gradients of the matrices that the stream goes into hide what comes of the others.
        let behind = if case.software().tensor_beside { 0.5 * passes.weights.seconds } else { 0.0 };
        let left = (self.tensor_hideable * layers - behind).max(0.0);
        waits.tensor = there + again + back + left;
        waits.forward += there;
        waits.input += again + back + left;
        // Rings hide behind the attention that they feed; a third of the computing is a cautious guess of it.
        let [fore, aft] = self.ring.map(|seconds| seconds * layers);
        let fore = (fore - passes.forward.seconds / 3.0).max(0.0) + self.context[0] * layers;
        let aft = (aft - passes.input.seconds / 3.0).max(0.0)
            + (self.context[1] + self.context[2]) * layers;
        waits.context = fore + aft;
        waits.forward += fore;
        waits.input += aft;
        let [fore, again, aft] = self.expert.map(|seconds| seconds * layers);
        waits.expert = fore + again + aft;
        waits.forward += fore;
        waits.input += again + aft;
        self.wait_for_blocks(case, passes, layers, &mut waits);
        waits
    }

    /// ZeRO-3 gathers one block ahead: the first of a pass is waited for, and what takes longer than the passes.
    fn wait_for_blocks(&self, case: &Case, passes: &Passes, layers: f64, waits: &mut Waits) {
        let beside = case.software().data_beside;
        let left = |exchanges: f64, compute: f64, first: f64| match beside {
            true => (exchanges - compute).max(0.0) + first + BESIDE * exchanges.min(compute),
            false => exchanges,
        };
        let [fore, aft] = self.gathers;
        let forward = left(fore * self.gather * layers, passes.forward.seconds, fore * self.gather);
        let backward = passes.again.seconds + passes.input.seconds + passes.weights.seconds;
        let exchanges = (aft * self.gather + self.scatter) * layers;
        let back = left(exchanges, backward, aft * self.gather + self.scatter);
        waits.data = forward + back;
        waits.forward += forward;
        waits.input += back;
    }
}
