//! Finds the best layouts of a model on a cluster. Exhaustive and deterministic.
//!
//! The search is branch and bound on two levels. A group fixes degrees, micro-batch, recomputation and placement, and has
//! lower bounds of time and memory. Groups are opened in the order of their bound; each of their layouts, one per ZeRO
//! level and schedule, gets its exact memory and a tighter time bound. Only layouts that may be among the best are
//! estimated. Bounds never exceed the true value, so nothing is missed; a test compares the search with an estimate of
//! every layout.

mod candidate;
mod knobs;
mod memory_bound;
mod reasons;
mod space;
mod walk;

pub use candidate::{Knob, layout_words};
pub use knobs::{KnobRange, Limits};
pub use reasons::{Alternative, Reason, bottlenecks, reasons, time_breakdown};
pub use space::MOST_CHUNKS;

use std::cell::RefCell;
use std::collections::HashMap;

use candidate::Candidate;
use lockstep_plan::{Config, ConfigError, Environment, Overlap, Plan};

use crate::case::Case;
use crate::estimate::estimate;
use crate::memory::Layers;
use crate::step::{Blocks, compute_bound};
use crate::{Cluster, Estimate, Options};

/// Input of a search.
pub struct SearchRequest<'a> {
    /// The run. Its micro-batch and its layout are ignored, except for `offload`.
    pub config: &'a Config,
    /// Vocabulary of the data, used if the model does not set it.
    pub vocab: Option<usize>,
    pub cluster: &'a Cluster,
    pub options: &'a Options,
    /// Numbers of ranks to try.
    pub ranks: Vec<usize>,
}

/// The quantity to minimize.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Objective {
    /// Step time.
    #[default]
    Time,
    /// Memory of the fullest rank.
    Memory,
    /// Step time × ranks.
    Cost,
}

/// A layout with its estimate.
#[derive(Clone, PartialEq, Debug)]
pub struct Proposal {
    pub plan: Plan,
    pub estimate: Estimate,
}

/// Statistics of a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SearchStats {
    pub groups: usize,
    /// Groups in which no layout can fit.
    pub infeasible: usize,
    /// Layouts of opened groups, those that do not fit, and those that were estimated.
    pub layouts: usize,
    pub too_large: usize,
    pub estimated: usize,
}

/// The search space of a run on a cluster.
pub struct Search<'a> {
    request: &'a SearchRequest<'a>,
    /// The run on one rank.
    plan: Plan,
    /// Options with `exact: false`: exact counts are too slow for millions of layouts.
    options: Options,
    groups: Vec<Group>,
    stats: RefCell<SearchStats>,
    /// Estimates by index of group and layout. `reasons` needs many of them again.
    cache: RefCell<HashMap<(usize, usize), Summary>>,
}

/// Summary of an estimate.
#[derive(Clone, Copy)]
struct Summary {
    seconds: f64,
    /// Memory of the fullest rank.
    bytes: f64,
    fits: bool,
}

struct Group {
    candidate: Candidate,
    /// Lower bounds.
    seconds: f64,
    bytes: f64,
    layers: Layers,
    /// None if no layout can fit.
    blocks: Option<Blocks>,
}

impl Proposal {
    /// Memory of the fullest rank.
    pub fn bytes(&self) -> f64 {
        self.estimate.stages.iter().map(|stage| stage.memory.total()).fold(0.0, f64::max)
    }

    /// Bytes by which the fullest rank exceeds its memory; negative if memory is left.
    pub fn over(&self) -> f64 {
        let over = self.estimate.stages.iter().map(|stage| stage.memory.total() - stage.available);
        over.fold(f64::NEG_INFINITY, f64::max)
    }
}

fn value(by: Objective, ranks: usize, seconds: f64, bytes: f64) -> f64 {
    match by {
        Objective::Time => seconds,
        Objective::Memory => bytes,
        Objective::Cost => ranks as f64 * seconds,
    }
}

impl<'a> Search<'a> {
    /// Builds the groups, or returns the errors of the config that do not depend on the layout.
    pub fn new(request: &'a SearchRequest<'a>) -> Result<Search<'a>, Vec<ConfigError>> {
        let mut alone = request.config.with_layout("");
        alone.layout.offload = request.config.layout.offload;
        alone.train.micro_batch = None;
        let mut env = Environment::one_host(1, request.cluster.cores.unwrap_or(1));
        env.gpu = request.cluster.has_gpus();
        env.data_vocab = request.vocab;
        let plan = Plan::resolve(&alone, &env)?;
        let options = Options { exact: false, ..request.options.clone() };
        let mut search = Search {
            request,
            plan,
            options,
            groups: Vec::new(),
            stats: RefCell::default(),
            cache: RefCell::default(),
        };
        search.find_groups();
        Ok(search)
    }

    pub fn stats(&self) -> SearchStats {
        *self.stats.borrow()
    }

    fn find_groups(&mut self) {
        let SearchRequest { cluster, ref ranks, .. } = *self.request;
        let options = &self.options;
        let most = cluster.differing(usize::MAX).into_iter().map(|rank| cluster.of_rank(rank).2);
        let most = most.fold(cluster.accelerator.memory(), f64::max);
        let mut scratch = self.plan.clone();
        for candidate in ranks.iter().flat_map(|ranks| space::groups(&self.plan, *ranks)) {
            self.write_to(&candidate, &mut scratch);
            let cluster = &*cluster.for_rank(candidate.ranks, &scratch);
            // The memory bound assumes ZeRO-3 on all replicas.
            let replicas = candidate.layout.data * candidate.layout.context;
            (scratch.layout.zero, scratch.layout.shard) =
                if replicas > 1 { (3, replicas) } else { (0, 1) };
            let case = Case::new(&scratch, cluster, options);
            let layers = Layers::of(&case);
            let bytes = memory_bound::least(&case, &layers);
            (scratch.layout.zero, scratch.layout.shard) = (0, 1);
            if bytes > most {
                self.groups.push(Group { candidate, seconds: 0.0, bytes, layers, blocks: None });
                continue;
            }
            let blocks = Blocks::of(&Case::new(&scratch, cluster, options));
            for order in space::orders(&scratch.mesh(), cluster) {
                scratch.layout.order = order;
                let seconds = compute_bound(&Case::new(&scratch, cluster, options), &blocks);
                let layout = lockstep_plan::Layout { order, ..candidate.layout.clone() };
                let candidate = Candidate { layout, ..candidate };
                let blocks = Some(blocks);
                self.groups.push(Group { candidate, seconds, bytes, layers, blocks });
            }
        }
        let mut stats = self.stats.borrow_mut();
        stats.groups = self.groups.len();
        stats.infeasible = self.groups.iter().filter(|group| group.blocks.is_none()).count();
    }

    /// The `count` best layouts that fit, best first. Ties are broken by memory (or time), then by the order of the search
    /// space.
    pub fn best(&self, by: Objective, count: usize, limits: &Limits) -> Vec<Proposal> {
        self.walk(by, count, limits, true)
    }

    /// The layout with the least memory, even if it does not fit.
    pub fn smallest(&self, limits: &Limits) -> Option<Proposal> {
        self.walk(Objective::Memory, 1, limits, false).pop()
    }

    /// The estimate of a layout, from the cache if possible.
    fn found(&self, leaf: &Candidate, number: (usize, usize)) -> Summary {
        if let Some(found) = self.cache.borrow().get(&number) {
            return *found;
        }
        self.stats.borrow_mut().estimated += 1;
        let mut scratch = self.plan.clone();
        self.write_to(leaf, &mut scratch);
        let estimate = estimate(&scratch, self.request.cluster, &self.options);
        let totals = estimate.stages.iter().map(|stage| stage.memory.total());
        let found = Summary {
            seconds: estimate.step_s,
            bytes: totals.fold(0.0, f64::max),
            fits: estimate.fits,
        };
        self.cache.borrow_mut().insert(number, found);
        found
    }

    /// The resolved plan of a layout, or None if it is invalid.
    fn resolved(&self, leaf: &Candidate) -> Option<Plan> {
        let SearchRequest { config, vocab, cluster, .. } = *self.request;
        let env = cluster.environment(leaf.ranks, vocab);
        Plan::resolve(&leaf.typed(config), &env).ok()
    }

    /// Writes a layout into `scratch`.
    fn write_to(&self, candidate: &Candidate, scratch: &mut Plan) {
        candidate.write_to(scratch);
        let env = self.request.cluster.environment(candidate.ranks, None);
        let typed = self.request.config.comm.overlap;
        scratch.comm.overlap = Overlap::resolve(typed, &scratch.mesh(), &env);
    }
}
