//! The reduction policy: when parameters are gathered and released and gradients reduced, over which group, in which
//! bucket, overlapped with compute or not. A value like [`Schedule`](crate::schedule::Schedule): the executor, the
//! memory ledger, the traffic count and the simulator all read it. Moves no data itself.
//!
//! | ZeRO | parameters | gradients |
//! |---|---|---|
//! | 0 | whole on every rank | all-reduced in buckets, once per step |
//! | 1 | whole; all-gathered after the optimizer | reduce-scattered block by block, once per step |
//! | 2 | whole; all-gathered after the optimizer | reduce-scattered block by block, every micro-batch |
//! | 3 | gathered before each pass of a block and released after it | as ZeRO-2 |
//! | 3, `keep_gathered` | gathered once per step and released after the passes | as ZeRO-2 |
//!
//! "Once per step" is during the last micro-batch's backward pass with overlap. Without overlap it is after all passes:
//! ranks that meet once wait for the slowest once. ZeRO-2 and 3 reduce immediately in any case, which frees the block's
//! gradient. Schedules that split the backward pass accumulate several micro-batches in one buffer at a time, so with
//! them ZeRO-2 and 3 reduce in the last micro-batch only. With hybrid sharding the reduced shard is then all-reduced
//! across its copies, once per step.
//!
//! ```
//! use lockstep_plan::reduction::{Gather, ReducePoint, ReductionPolicy};
//! use lockstep_plan::{Config, Environment, Plan};
//!
//! let policy = |layout: &str| {
//!     let sets = [&format!("layout.zero={layout}"), "layout.data=2", "model.vocab=64"].map(String::from);
//!     ReductionPolicy::of(&Plan::resolve(&Config::parse("", &sets), &Environment::one_host(2, 1)).unwrap())
//! };
//! assert_eq!(policy("1").reduce.unwrap().point, ReducePoint::EndOfPasses);
//! assert_eq!(policy("2").reduce.unwrap().point, ReducePoint::EveryMicroBatch);
//! assert_eq!(policy("3").gather, Gather::EveryPass);
//! ```

mod buckets;
mod calls;
mod compressed;
mod shared;
mod text;

pub use buckets::{Bucket, BucketRun, gather_group};
pub(crate) use calls::{Event, events};
pub use calls::{PassKind, Point, StateCall, StateCollective, StateOp};
pub use compressed::{WireCall, wire_calls};
pub use shared::SharedSum;

use crate::config::Compression;
use crate::model::Part;
use crate::plan::Plan;
use lockstep_types::Collective;

/// When one step gathers parameters and reduces gradients. The same for all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReductionPolicy {
    /// Micro-batches of a step.
    pub micro_batches: usize,
    pub gather: Gather,
    /// None with one replica.
    pub reduce: Option<Reduce>,
    /// Buckets are reduced while the backward pass goes on, and blocks are gathered one ahead.
    pub overlap: bool,
}

/// When the parameters of a block are gathered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gather {
    /// Every rank holds and updates all of them.
    Never,
    /// Every rank holds all of them and updates its shard; the shards are all-gathered after the optimizer.
    AfterOptimizer,
    /// Before each forward and backward pass of the block; released after it.
    EveryPass,
    /// Before the block's first forward pass of a step; released after all passes.
    EveryStep,
}

/// How gradients are reduced over the replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reduce {
    pub collective: Collective,
    /// Each rank keeps its shard of the sum and frees the rest. Otherwise it keeps the whole sum.
    pub shards: bool,
    pub point: ReducePoint,
}

/// When a complete bucket is reduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReducePoint {
    /// As soon as it is complete, in every micro-batch.
    EveryMicroBatch,
    /// As soon as it is complete in the last micro-batch.
    LastMicroBatch,
    /// After all passes of the step.
    EndOfPasses,
}

/// The inputs of a [`ReductionPolicy`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PolicyInputs {
    /// ZeRO level.
    pub zero: u8,
    pub keep_gathered: bool,
    pub replicas: usize,
    pub micro_batches: usize,
    /// The schedule computes weight gradients separately from input gradients.
    pub splits_backward: bool,
    /// The plan overlaps communication with compute.
    pub overlap: bool,
    pub program: Program,
}

/// Differences between training programs that a plan does not describe. The default is Lockstep; `sim` describes
/// others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Program {
    /// Overlaps reductions with the backward pass where the plan asks for it.
    pub overlaps: bool,
    /// Sharded gradients are reduce-scattered; otherwise all-reduced, and each rank uses its shard (DeepSpeed's
    /// ZeRO-1).
    pub reduce_scatters: bool,
    /// With `keep_gathered`, gradients are accumulated unsharded and reduced once per step: FSDP2 under pipeline
    /// schedules does not synchronize gradients before the last micro-batch.
    pub accumulates_unsharded: bool,
}

impl Default for Program {
    fn default() -> Program {
        Program { overlaps: true, reduce_scatters: true, accumulates_unsharded: false }
    }
}

impl PolicyInputs {
    /// One rank without replicas: nothing is gathered or reduced.
    pub const ONE_RANK: PolicyInputs = PolicyInputs {
        zero: 0,
        keep_gathered: false,
        replicas: 1,
        micro_batches: 1,
        splits_backward: false,
        overlap: false,
        program: Program { overlaps: true, reduce_scatters: true, accumulates_unsharded: false },
    };

    pub fn of(plan: &Plan, program: Program) -> PolicyInputs {
        let layout = &plan.layout;
        PolicyInputs {
            zero: layout.zero,
            keep_gathered: layout.keep_gathered,
            replicas: layout.data * layout.context,
            micro_batches: plan.train.accumulation,
            splits_backward: layout.pipe > 1 && layout.schedule.splits(),
            overlap: plan.comm.overlap.data,
            program,
        }
    }
}

impl ReductionPolicy {
    /// Lockstep's policy for a plan.
    pub fn of(plan: &Plan) -> ReductionPolicy {
        ReductionPolicy::new(PolicyInputs::of(plan, Program::default()))
    }

    pub fn new(inputs: PolicyInputs) -> ReductionPolicy {
        let PolicyInputs { zero, keep_gathered, program, .. } = inputs;
        let overlap = inputs.overlap && program.overlaps && inputs.replicas > 1;
        let gather = match (zero, keep_gathered) {
            (0, _) => Gather::Never,
            (1 | 2, _) => Gather::AfterOptimizer,
            (_, false) => Gather::EveryPass,
            (_, true) => Gather::EveryStep,
        };
        let unsharded = gather == Gather::EveryStep && program.accumulates_unsharded;
        let point = match zero {
            0 | 1 if overlap => ReducePoint::LastMicroBatch,
            0 | 1 => ReducePoint::EndOfPasses,
            _ if inputs.splits_backward || unsharded => ReducePoint::LastMicroBatch,
            _ => ReducePoint::EveryMicroBatch,
        };
        let scatters = zero > 0 && program.reduce_scatters;
        let collective = if scatters { Collective::ReduceScatter } else { Collective::AllReduce };
        let reduce =
            (inputs.replicas > 1).then_some(Reduce { collective, shards: zero > 0, point });
        ReductionPolicy { micro_batches: inputs.micro_batches, gather, reduce, overlap }
    }

    /// Whether blocks are gathered one ahead while another is computed.
    pub fn prefetches(&self) -> bool {
        self.overlap && self.gather.shards_parameters()
    }

    /// Whether the gradients of a micro-batch are reduced, during its backward pass or at the end of the passes.
    /// Otherwise later micro-batches are added to them first.
    pub fn reduces(&self, last_micro_batch: bool) -> bool {
        let every = |reduce: Reduce| reduce.point == ReducePoint::EveryMicroBatch;
        self.reduce.is_some_and(|reduce| last_micro_batch || every(reduce))
    }

    /// Whether the gradients of every micro-batch are reduced by themselves.
    pub fn reduces_every_micro_batch(&self) -> bool {
        self.reduces(false)
    }

    /// Whether complete buckets wait for the end of the passes.
    pub fn reduces_at_end(&self) -> bool {
        self.reduce.is_some_and(|reduce| reduce.point == ReducePoint::EndOfPasses)
    }

    /// Reductions in flight at most. Sharded gradients have one while the next bucket is computed, so that their memory
    /// stays bounded when communication is slower than compute. Whole gradients exist in any case.
    pub fn max_in_flight(&self) -> usize {
        match (self.overlap, self.shards_gradients()) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => usize::MAX,
        }
    }

    /// Whether the gradients of one micro-batch exist whole only until their block is reduced. Otherwise whole gradients
    /// exist at the end of the passes.
    pub fn frees_whole_gradients(&self) -> bool {
        self.reduce.is_some_and(|reduce| match reduce.point {
            ReducePoint::EveryMicroBatch => reduce.shards,
            ReducePoint::LastMicroBatch => reduce.shards && self.micro_batches == 1,
            ReducePoint::EndOfPasses => false,
        })
    }

    /// How often a step sends all parameters and all gradients over the replicas, in units of a gather or scatter.
    pub fn sends_per_step(&self) -> [f64; 2] {
        let passes = self.micro_batches as f64;
        let gathers = match self.gather {
            Gather::Never => 0.0,
            Gather::AfterOptimizer | Gather::EveryStep => 1.0,
            Gather::EveryPass => 2.0 * passes,
        };
        let reductions = self.reduce.map_or(0.0, |reduce| {
            // An all-reduce is a reduce-scatter and an all-gather.
            let each = if reduce.collective == Collective::AllReduce { 2.0 } else { 1.0 };
            each * if reduce.point == ReducePoint::EveryMicroBatch { passes } else { 1.0 }
        });
        [gathers, reductions]
    }

    /// Whether each rank keeps a shard of the reduced gradients.
    pub fn shards_gradients(&self) -> bool {
        self.reduce.is_some_and(|reduce| reduce.shards)
    }
}

impl Gather {
    /// Whether a rank holds only its shard of the parameters between steps.
    pub fn shards_parameters(self) -> bool {
        matches!(self, Gather::EveryPass | Gather::EveryStep)
    }

    /// Whether a rank updates only its shard of the parameters.
    pub fn shards_optimizer(self) -> bool {
        self != Gather::Never
    }

    /// Whether a gathered block is released after a pass.
    pub fn releases_after(self, pass: PassKind) -> bool {
        match self {
            Gather::Never | Gather::AfterOptimizer => false,
            Gather::EveryPass => true,
            // Inference is outside of a step.
            Gather::EveryStep => pass == PassKind::Inference,
        }
    }
}

/// The policy applied to the blocks of one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankReductions {
    pub policy: ReductionPolicy,
    /// In the order of the backward pass.
    pub buckets: Vec<Bucket>,
    /// By block, the block that is gathered during its forward and backward pass; empty without prefetching.
    pub prefetch: Vec<Prefetch>,
    /// Sums over other axes at the end of the passes.
    pub shared: Vec<SharedSum>,
    /// Gradients of a block are copied to host memory and freed in the last micro-batch's backward pass. Otherwise
    /// offloaded gradients are copied at the end of the passes: they are final only when they have been reduced.
    pub offload_in_backward: bool,
}

/// The block that is gathered ahead during a pass of another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prefetch {
    pub forward: Option<usize>,
    pub backward: Option<usize>,
}

impl RankReductions {
    /// The reductions of one rank of a plan.
    pub fn of(plan: &Plan, part: &Part) -> RankReductions {
        let offload = plan.layout.offload.gradients();
        let min_bucket = match offload {
            // Each block leaves the device by itself.
            true => 0,
            false => plan.comm.bucket_bytes / plan.precision.gradients.bytes(),
        };
        let reductions = RankReductions::new(ReductionPolicy::of(plan), part, min_bucket)
            .with_shared_sums(part, plan.layout.sequence, plan.comm.compression);
        let local = reductions.policy.reduce.is_none() && reductions.shared.is_empty();
        RankReductions { offload_in_backward: offload && local, ..reductions }
    }

    /// Buckets have at least `min_bucket` elements where gradients are kept whole. Without sums over other axes.
    pub fn new(policy: ReductionPolicy, part: &Part, min_bucket: usize) -> RankReductions {
        let prefetch = if policy.prefetches() { prefetch(part) } else { Vec::new() };
        let buckets = buckets::buckets(&policy, part, min_bucket);
        let (shared, offload_in_backward) = (Vec::new(), false);
        RankReductions { policy, buckets, prefetch, shared, offload_in_backward }
    }

    /// Adds the sums over other axes.
    pub fn with_shared_sums(
        self,
        part: &Part,
        sequence: bool,
        compression: Compression,
    ) -> RankReductions {
        RankReductions { shared: shared::sums(part, sequence, compression), ..self }
    }

    /// The block to gather ahead during a pass.
    pub fn prefetch(&self, block: usize, pass: PassKind) -> Option<usize> {
        let prefetch = self.prefetch.get(block)?;
        match pass {
            PassKind::Forward | PassKind::Inference => prefetch.forward,
            PassKind::Backward => prefetch.backward,
            PassKind::Loss | PassKind::Weights => None,
        }
    }
}

/// The next block of the stage in the forward pass, and the next layer in the backward pass. The embedding's backward
/// pass needs no parameters.
fn prefetch(part: &Part) -> Vec<Prefetch> {
    let mut prefetch = vec![Prefetch::default(); part.blocks.len()];
    for stage in &part.stages {
        for block in stage.clone() {
            let (next, before) = (block + 1, block.checked_sub(1));
            prefetch[block] = Prefetch {
                forward: (next < stage.end).then_some(next),
                backward: before.filter(|before| stage.contains(before) && !part.is_first(*before)),
            };
        }
    }
    prefetch
}
