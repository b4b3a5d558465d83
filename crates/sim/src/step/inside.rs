//! Communication inside passes: of the tensor, context and expert axes, gathers of parameters, and reductions of every
//! micro-batch. A pass waits for what is not overlapped.

use lockstep_plan::context::ContextKind;
use lockstep_plan::model::Moe;
use lockstep_plan::reduction::Gather;
use lockstep_plan::{Collective, GroupKind, Phase, Recompute};

use crate::case::Case;
use crate::comm::Flows;
use crate::compute::{Passes, attention};

/// The share of overlapped communication by which it slows compute down: units that move data do not compute.
pub(super) const OVERLAP_COST: f64 = 0.1;

/// Seconds of communication for one layer and micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Inside {
    /// Forward, recomputed and backward, never overlapped; and the part that weight gradients may overlap.
    tensor: [f64; 3],
    tensor_overlappable: f64,
    context: [f64; 3],
    /// The ring's messages, forward and backward, and the attention that overlaps with them.
    ring: [f64; 2],
    attend: [f64; 2],
    expert: [f64; 3],
    /// Gathering a layer and reducing its gradient: most layers, and the dense ones at the start of a mixture.
    gather: [f64; 2],
    reduce: [f64; 2],
    /// Gathering and reducing a token table.
    table: [f64; 2],
    /// The share of micro-batches in which layers are gathered, forward and backward, and gradients reduced. What
    /// happens once per step overlaps with the passes of one micro-batch, not of all.
    gathers: [f64; 2],
    reduces: f64,
}

/// Exposed communication of a stage for one micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waits {
    pub tensor: f64,
    pub context: f64,
    pub expert: f64,
    pub data: f64,
    /// All of it, by pass.
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

    /// Passes over layers in a step, on the rank with the most layers.
    fn times(case: &Case) -> f64 {
        let layers = case.shape().layers.div_ceil(case.pipe());
        (layers * case.micros()) as f64
    }

    fn tensor(&mut self, case: &Case, flows: &mut Flows) {
        let kind = (GroupKind::Tensor, case.tensor());
        let bytes = case.tokens * case.dim * case.width;
        // The input of attention is the residual stream, or its latents.
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
            self.tensor_overlappable = 2.0 * back;
        } else {
            // The inputs of fp8 matmuls are gathered in fp8.
            let inputs = if case.fp8() { bytes / case.width } else { bytes };
            let gather = flows.add(kind, AllGather, Forward, mean * inputs, 2.0 * times);
            let scatter = flows.add(kind, ReduceScatter, Forward, bytes, 2.0 * times);
            // The gradient of each half's output, and its input once more.
            flows.add(kind, AllGather, Backward, mean * inputs, (2.0 + again) * times);
            let outs = flows.add(kind, AllGather, Backward, inputs, 2.0 * times);
            let ins = flows.add(kind, ReduceScatter, Backward, mean * bytes, 2.0 * times);
            flows.add(kind, ReduceScatter, Backward, bytes, again * times);
            self.tensor = [2.0 * (gather + scatter), again * (gather + scatter), 2.0 * outs];
            self.tensor_overlappable = 2.0 * (gather + ins);
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

    /// Gathers of parameters, and gradient reductions that belong to the passes.
    fn gathered(&mut self, case: &Case, flows: &mut Flows) {
        if !reduces_inside(case) {
            return;
        }
        let lead = case.lead().map_or([0.0; 2], |lead| lead.layer_params());
        let (params, times) = ([case.layer_params(), lead], Inside::times(case));
        let per_micro = 1.0 / case.micros() as f64;
        self.gathers = match case.policy.gather {
            Gather::EveryStep => [per_micro, 0.0],
            Gather::EveryPass => [1.0, 1.0],
            Gather::Never | Gather::AfterOptimizer => [0.0, 0.0],
        };
        self.reduces = if case.policy.reduces_every_micro_batch() { 1.0 } else { per_micro };
        let reduces = self.reduces;
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
        self.reduce = params.map(|params| both(params, 0.0, wire, reduces * times));
        self.table[1] = both(table, 0.0, wire, reduces * micros);
    }

    /// Exposed communication of a stage.
    pub fn waits(&self, case: &Case, passes: &Passes, stage: usize) -> Waits {
        let tables = f64::from(stage == 0) + f64::from(stage + 1 == case.stages());
        self.waits_of(case, passes, case.kinds(stage), tables)
    }

    /// Exposed communication of `kinds` layers of each kind and some token tables.
    pub fn waits_of(&self, case: &Case, passes: &Passes, kinds: [usize; 2], tables: f64) -> Waits {
        let [mixtures, leading] = kinds.map(|layers| layers as f64);
        let layers = mixtures + leading;
        let mut waits = Waits::default();
        // If tokens go to experts from the ranks that hold them, only attention gathers them.
        let halves = if case.tensor_experts > 1.0 { 0.5 * mixtures + leading } else { layers };
        let [there, again, back] = self.tensor.map(|seconds| seconds * halves);
        // Half of the weight gradients overlap with the communication of the others.
        let behind =
            if case.software().tensor_overlap { 0.5 * passes.weights.seconds } else { 0.0 };
        let exposed = (self.tensor_overlappable * halves - behind).max(0.0);
        waits.tensor = there + again + back + exposed;
        waits.forward += there;
        waits.input += again + back + exposed;
        // Attention to one part of the keys overlaps with the transfer of the next.
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

    /// Blocks are gathered one ahead: the first of a pass is exposed, and whatever takes longer than the passes. Rings on
    /// the same link leave less of the passes to overlap with.
    fn wait_for_blocks(
        &self,
        case: &Case,
        passes: &Passes,
        [mixtures, leading, tables]: [f64; 3],
        waits: &mut Waits,
    ) {
        let overlap = case.overlaps();
        let shared = case.context().link(case.cluster) == case.shard().link(case.cluster);
        let layers = mixtures + leading;
        let rings = self.ring.map(|seconds| if shared { seconds * layers } else { 0.0 });
        let all = |[most, first]: [f64; 2]| most * mixtures + first * leading;
        let one = |[most, first]: [f64; 2]| if mixtures > 0.0 { most } else { first };
        let exposed = |comm: f64, compute: f64, first: f64| match overlap {
            true => (comm - compute).max(0.0) + first + OVERLAP_COST * comm.min(compute),
            false => comm,
        };
        let [fore, aft] = self.gathers;
        let ahead = (passes.forward.seconds - rings[0]).max(0.0);
        let gathers = all(self.gather) + self.table[0] * tables;
        let forward = fore * exposed(gathers, ahead, one(self.gather));
        let backward = passes.again.seconds + passes.input.seconds + passes.weights.seconds;
        let backward = (backward - rings[1]).max(0.0);
        let (each, first) = (aft * all(self.gather), aft * one(self.gather));
        let with_reductions = each + all(self.reduce) + self.table[1] * tables;
        let back = (1.0 - self.reduces) * exposed(each, backward, first)
            + self.reduces * exposed(with_reductions, backward, first + one(self.reduce));
        waits.data = forward + back;
        waits.forward += forward;
        waits.input += back;
    }
}

/// The share of the rows for experts that crosses between hosts if a token is sent once to each host: the expected
/// number of distinct hosts among evenly chosen experts.
fn copies(case: &Case, moe: Moe) -> f64 {
    let hosts = (case.experts().members * case.experts().stride).div_ceil(case.cluster.per_host);
    if !case.software().once_per_host || hosts <= 1 {
        return 1.0;
    }
    let (hosts, each) = (hosts as f64, moe.top_k as f64);
    let met = (hosts - 1.0) * (1.0 - (1.0 - 1.0 / hosts).powf(each));
    met / (each * (1.0 - 1.0 / hosts))
}

/// Whether gradients are reduced inside the passes: in every micro-batch, or together with gathers. Otherwise after them.
pub(super) fn reduces_inside(case: &Case) -> bool {
    case.policy.gather.shards_parameters() || case.policy.reduces_every_micro_batch()
}
