//! Exchanges inside passes: of the tensor, context and expert axes, and of the blocks that ZeRO-3 gathers. What
//! of them nothing hides, a pass waits for.

use lockstep_plan::context::ContextKind;
use lockstep_plan::model::Moe;
use lockstep_plan::{Collective, GroupKind, Phase, Recompute};

use crate::case::Case;
use crate::comm::Flows;
use crate::compute::{Passes, attention};

/// What exchanges beside the computing take from it: units that move data do not compute.
pub(super) const BESIDE: f64 = 0.1;

/// Seconds of exchanges for one layer and micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Inside {
    /// Forward, done again, and backward: those that nothing can hide, and those that weight gradients may.
    tensor: [f64; 3],
    tensor_hideable: f64,
    context: [f64; 3],
    /// Of the ring, forward and backward, and the attention behind which its messages hide.
    ring: [f64; 2],
    attend: [f64; 2],
    expert: [f64; 3],
    /// ZeRO-3: gathering a layer, and summing its gradient; of most layers, and of a mixture's first.
    gather: [f64; 2],
    scatter: [f64; 2],
    /// The same of a token table.
    table: [f64; 2],
    /// In what share of the micro-batches layers are gathered, forward and backward, and gradients are summed. What
    /// happens once in a step hides behind the passes of one micro-batch, not of all.
    gathers: [f64; 2],
    scatters: f64,
}

/// What a stage's passes over a micro-batch wait for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waits {
    pub tensor: f64,
    pub context: f64,
    pub expert: f64,
    pub data: f64,
    /// The same by pass.
    pub forward: f64,
    pub input: f64,
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
        let kind = (GroupKind::Tensor, case.tensor());
        let bytes = case.tokens * case.dim * case.width;
        // Into the first half goes the stream, or the latents of its attention.
        let mean = (case.entering() / case.dim + 1.0) / 2.0;
        let times = Inside::times(case);
        let again = if case.layout().recompute == Recompute::Full { 2.0 } else { 0.0 };
        use Collective::{AllGather, AllReduce, ReduceScatter};
        use Phase::{Backward, Forward};
        if !case.layout().sequence {
            let sum = flows.add(kind, AllReduce, Forward, bytes, 2.0 * times);
            let back = flows.add(kind, AllReduce, Backward, mean * bytes, 2.0 * times);
            flows.add(kind, AllReduce, Backward, bytes, again * times);
            self.tensor = [2.0 * sum, again * sum, 0.0];
            self.tensor_hideable = 2.0 * back;
        } else {
            // What goes into a multiply in 8 bits is gathered in 8 bits.
            let narrow = if case.rate() > case.bf16_rate() { bytes / case.width } else { bytes };
            let gather = flows.add(kind, AllGather, Forward, mean * narrow, 2.0 * times);
            let scatter = flows.add(kind, ReduceScatter, Forward, bytes, 2.0 * times);
            // The gradient of each half's output, and its input once more.
            flows.add(kind, AllGather, Backward, mean * narrow, (2.0 + again) * times);
            let outs = flows.add(kind, AllGather, Backward, narrow, 2.0 * times);
            let ins = flows.add(kind, ReduceScatter, Backward, mean * bytes, 2.0 * times);
            flows.add(kind, ReduceScatter, Backward, bytes, again * times);
            self.tensor = [2.0 * (gather + scatter), again * (gather + scatter), 2.0 * outs];
            self.tensor_hideable = 2.0 * (gather + ins);
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
        let near = crate::GroupPlacement { members: ulysses, ..all };
        let heads = case.tokens * case.queries * case.width;
        let outs = case.tokens * case.attended * case.width;
        let keys = case.tokens * (case.keys + case.values) * case.width;
        let kind = (GroupKind::Context, near);
        if case.layout().context_kind != ContextKind::Ring {
            let there = flows.add(kind, Collective::AllToAll, Phase::Forward, heads + keys, times)
                + flows.add(kind, Collective::AllToAll, Phase::Forward, outs, times);
            flows.add(
                kind,
                Collective::AllToAll,
                Phase::Backward,
                heads + keys,
                (1.0 + again) * times,
            );
            flows.add(kind, Collective::AllToAll, Phase::Backward, outs, (1.0 + again) * times);
            self.context = [there, again * there, there];
        }
        if rounds > 0.0 {
            let kind = (
                GroupKind::Context,
                crate::GroupPlacement { members: ranks / ulysses, stride: all.stride * ulysses },
            );
            let there = flows.add(kind, Collective::SendRecv, Phase::Forward, keys, rounds * times);
            // Keys and values once more, and their gradients in f32 with them.
            let back = flows.add(
                kind,
                Collective::SendRecv,
                Phase::Backward,
                keys * (1.0 + 4.0 / case.width),
                (rounds + again * rounds) * times,
            );
            self.ring = [rounds * there, rounds * (back + again * there)];
            let [fore, aft] = attention(case);
            self.attend = [fore.seconds, aft.seconds + again * fore.seconds];
        }
    }

    fn expert(&mut self, case: &Case, flows: &mut Flows) {
        let Some(moe) = case.moe else { return };
        let kind = (GroupKind::Expert, case.experts());
        let bytes = case.rows * moe.top_k as f64 * case.dim * case.width * copies(case, moe);
        let mixtures = case.shape().expert_layers().div_ceil(case.pipe());
        let times = (mixtures * case.micros()) as f64;
        let again = if case.layout().recompute == Recompute::Full { 2.0 } else { 0.0 };
        let rows = flows.add(kind, Collective::AllToAllV, Phase::Forward, bytes, 2.0 * times);
        flows.add(kind, Collective::AllToAllV, Phase::Backward, bytes, (2.0 + again) * times);
        self.expert = [2.0 * rows, again * rows, 2.0 * rows];
    }

    /// ZeRO-3 gathers blocks; it and ZeRO-2 sum the gradients of every micro-batch by itself, unless weights are put
    /// off, or blocks stay whole.
    fn gathered(&mut self, case: &Case, flows: &mut Flows) {
        let zero = case.layout().zero;
        if zero < 3 && !sums_each(case) {
            return;
        }
        let lead = case.lead().map_or([0.0; 2], |lead| lead.layer_params());
        let (params, times) = ([case.layer_params(), lead], Inside::times(case));
        let keeps = case.layout().keep_gathered;
        let per_micro = 1.0 / case.micros() as f64;
        self.gathers = match (zero, keeps) {
            (3, true) => [per_micro, 0.0],
            (3, false) => [1.0, 1.0],
            _ => [0.0, 0.0],
        };
        self.scatters = if sums_each(case) { 1.0 } else { per_micro };
        let scatters = self.scatters;
        let table = [case.vocab * case.dim, 0.0];
        let mut both = |[dense, expert]: [f64; 2], gathers: f64, width: f64, times: f64| {
            let (collective, phase, groups) = match gathers > 0.0 {
                true => (
                    Collective::AllGather,
                    Phase::Forward,
                    [GroupKind::Gather, GroupKind::ExpertGather],
                ),
                false => (
                    Collective::ReduceScatter,
                    Phase::Backward,
                    [GroupKind::Shard, GroupKind::ExpertShard],
                ),
            };
            flows.add((groups[0], case.shard()), collective, phase, dense * width, times)
                + flows.add(
                    (groups[1], case.same_experts()),
                    collective,
                    phase,
                    expert * width,
                    times,
                )
        };
        let (gathers, micros) = (self.gathers[0] + self.gathers[1], case.micros() as f64);
        if gathers > 0.0 {
            self.gather = params.map(|params| both(params, gathers, case.width, gathers * times));
            self.table[0] = both(table, gathers, case.width, self.gathers[0] * micros);
        }
        let wire = case.software().wire;
        self.scatter = params.map(|params| both(params, 0.0, wire, scatters * times));
        self.table[1] = both(table, 0.0, wire, scatters * micros);
    }

    /// What a stage waits for.
    pub fn waits(&self, case: &Case, passes: &Passes, stage: usize) -> Waits {
        let tables = f64::from(stage == 0) + f64::from(stage + 1 == case.stages());
        self.waits_of(case, passes, case.kinds(stage), tables)
    }

    /// What so many layers, and those of a mixture's first, wait for with so many token tables.
    pub fn waits_of(&self, case: &Case, passes: &Passes, kinds: [usize; 2], tables: f64) -> Waits {
        let [mixtures, leading] = kinds.map(|layers| layers as f64);
        let layers = mixtures + leading;
        let mut waits = Waits::default();
        // Where tokens go to experts from the ranks that have them, only attention brings them together.
        let halves = if case.dealt > 1.0 { 0.5 * mixtures + leading } else { layers };
        let [there, again, back] = self.tensor.map(|seconds| seconds * halves);
        // Weight gradients of the matrices that the stream goes into hide what comes of the others.
        let behind =
            if case.software().tensor_overlap { 0.5 * passes.weights.seconds } else { 0.0 };
        let left = (self.tensor_hideable * halves - behind).max(0.0);
        waits.tensor = there + again + back + left;
        waits.forward += there;
        waits.input += again + back + left;
        // What a ring brings is attended to while the next is on its way.
        let ring = |at: usize| (self.ring[at] - self.attend[at]).max(0.0) * layers;
        let fore = ring(0) + self.context[0] * layers;
        let aft = ring(1) + (self.context[1] + self.context[2]) * layers;
        waits.context = fore + aft;
        waits.forward += fore;
        waits.input += aft;
        let [fore, again, aft] = self.expert.map(|seconds| seconds * mixtures);
        waits.expert = fore + again + aft;
        waits.forward += fore;
        waits.input += again + aft;
        self.wait_for_blocks(case, passes, [mixtures, leading, tables], &mut waits);
        waits
    }

    /// ZeRO-3 gathers one block ahead: the first of a pass is waited for, and what takes longer than the passes. Rings
    /// that hide behind the same passes on the same link leave that much less of them.
    fn wait_for_blocks(
        &self,
        case: &Case,
        passes: &Passes,
        [mixtures, leading, tables]: [f64; 3],
        waits: &mut Waits,
    ) {
        let beside = case.data_overlap();
        let shared = case.context().link(case.cluster) == case.shard().link(case.cluster);
        let layers = mixtures + leading;
        let rings = self.ring.map(|seconds| if shared { seconds * layers } else { 0.0 });
        let all = |[most, first]: [f64; 2]| most * mixtures + first * leading;
        let one = |[most, first]: [f64; 2]| if mixtures > 0.0 { most } else { first };
        let left = |exchanges: f64, compute: f64, first: f64| match beside {
            true => (exchanges - compute).max(0.0) + first + BESIDE * exchanges.min(compute),
            false => exchanges,
        };
        let [fore, aft] = self.gathers;
        let ahead = (passes.forward.seconds - rings[0]).max(0.0);
        let gathers = all(self.gather) + self.table[0] * tables;
        let forward = fore * left(gathers, ahead, one(self.gather));
        let backward = passes.again.seconds + passes.input.seconds + passes.weights.seconds;
        let backward = (backward - rings[1]).max(0.0);
        let (each, first) = (aft * all(self.gather), aft * one(self.gather));
        let with_sums = each + all(self.scatter) + self.table[1] * tables;
        let back = (1.0 - self.scatters) * left(each, backward, first)
            + self.scatters * left(with_sums, backward, first + one(self.scatter));
        waits.data = forward + back;
        waits.forward += forward;
        waits.input += back;
    }
}

/// Of the rows that go to experts, what crosses between hosts where a token goes once to each of them: of `hosts` that
/// are chosen from evenly, so many are met.
fn copies(case: &Case, moe: Moe) -> f64 {
    let hosts = (case.experts().members * case.experts().stride).div_ceil(case.cluster.per_host);
    if !case.software().once_per_host || hosts <= 1 {
        return 1.0;
    }
    let (hosts, each) = (hosts as f64, moe.top_k as f64);
    let met = (hosts - 1.0) * (1.0 - (1.0 - 1.0 / hosts).powf(each));
    met / (each * (1.0 - 1.0 / hosts))
}

/// Whether the gradients of every micro-batch are summed by themselves.
pub(super) fn sums_each(case: &Case) -> bool {
    let layout = case.layout();
    let mixed = layout.pipe > 1 && layout.schedule.splits();
    match layout.zero {
        0 | 1 => false,
        2 => !mixed,
        _ => !mixed && !layout.keep_gathered,
    }
}
