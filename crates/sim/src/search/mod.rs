//! The best layouts for a model on a cluster, of all that there are: exact, and the same in every run.
//!
//! Layouts are found in two rounds. Groups are degrees, micro-batches, recompute and placements; each has a time and a
//! memory below which none of its layouts can be. They are opened from the lowest bound on; what they hold, every ZeRO
//! stage and every schedule, is asked for its memory exactly and for a sharper bound. Only what may still be among
//! the best is estimated. A bound never lies
//! above what it bounds, so nothing is missed; a test holds the search against an estimate of everything.

mod candidate;
mod knobs;
mod reasons;
mod room;
mod space;

pub use candidate::{Knob, layout_words};
pub use knobs::{Limits, Turn};
pub use reasons::{Alternative, Reason, limit, parts, reasons};
pub use space::MOST_CHUNKS;

use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use candidate::Candidate;
use lockstep_plan::{Config, ConfigError, Environment, Overlap, Plan};

use crate::case::Case;
use crate::estimate::{available, estimate};
use crate::memory::Layers;
use crate::step::{Blocks, bound, compute_bound, passes_bound};
use crate::{Cluster, Estimate, Options};

/// What is searched, on what.
pub struct SearchRequest<'a> {
    /// The run; what it says of its layout and its micro-batch is not asked.
    pub config: &'a Config,
    /// Of the data, where the model does not say.
    pub vocab: Option<usize>,
    pub cluster: &'a Cluster,
    pub options: &'a Options,
    /// Ranks to use; several where fewer may be cheaper.
    pub ranks: Vec<usize>,
}

/// What is best.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Objective {
    /// Seconds of a step.
    #[default]
    Time,
    /// Bytes of the fullest rank.
    Memory,
    /// Seconds of a step, of every rank that takes part.
    Cost,
}

/// A layout that was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Proposal {
    pub plan: Plan,
    pub estimate: Estimate,
}

/// How much was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SearchStats {
    pub groups: usize,
    /// Of these, those of which nothing can fit.
    pub infeasible: usize,
    /// Layouts of opened groups, those of them that do not fit, and those that were estimated.
    pub layouts: usize,
    pub too_large: usize,
    pub estimated: usize,
}

/// All layouts of a run on a cluster, sorted into groups.
pub struct Search<'a> {
    wanted: &'a SearchRequest<'a>,
    /// The run on one rank.
    plan: Plan,
    /// By formula: nobody counts millions of layouts to the byte.
    options: Options,
    groups: Vec<Group>,
    looked: RefCell<SearchStats>,
    /// What was estimated, by the numbers of group and layout: those that ask why ask for much of it again.
    known: RefCell<HashMap<(usize, usize), Found>>,
}

/// What an estimate came to.
#[derive(Clone, Copy)]
struct Found {
    seconds: f64,
    /// Of the fullest rank.
    bytes: f64,
    fits: bool,
}

struct Group {
    candidate: Candidate,
    /// At least.
    seconds: f64,
    bytes: f64,
    layers: Layers,
    /// Where there is none, nothing of it can fit.
    blocks: Option<Blocks>,
}

impl Proposal {
    /// Bytes of the fullest rank.
    pub fn bytes(&self) -> f64 {
        self.estimate.stages.iter().map(|stage| stage.memory.total()).fold(0.0, f64::max)
    }

    /// By how many bytes the fullest rank has too few; below zero, how many are left.
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
    /// Finds the groups, or what is wrong with the run on any layout.
    pub fn new(wanted: &'a SearchRequest<'a>) -> Result<Search<'a>, Vec<ConfigError>> {
        let mut alone = wanted.config.with_layout("");
        alone.train.micro_batch = None;
        let mut env = Environment::one_host(1, wanted.cluster.cores.unwrap_or(1));
        env.data_vocab = wanted.vocab;
        let plan = Plan::resolve(&alone, &env)?;
        let options = Options { exact: false, ..wanted.options.clone() };
        let mut search = Search {
            wanted,
            plan,
            options,
            groups: Vec::new(),
            looked: RefCell::default(),
            known: RefCell::default(),
        };
        search.find_groups();
        Ok(search)
    }

    pub fn looked(&self) -> SearchStats {
        *self.looked.borrow()
    }

    fn find_groups(&mut self) {
        let SearchRequest { cluster, ref ranks, .. } = *self.wanted;
        let options = &self.options;
        let most = cluster.differing(usize::MAX).into_iter().map(|rank| cluster.of_rank(rank).2);
        let most = most.fold(cluster.accelerator.memory(), f64::max);
        let mut paper = self.plan.clone();
        for candidate in ranks.iter().flat_map(|ranks| space::groups(&self.plan, *ranks)) {
            self.onto(&candidate, &mut paper);
            let cluster = &*cluster.shared(candidate.ranks, paper.train.threads);
            // ZeRO-3 on all replicas, for the memory that there must be.
            let replicas = candidate.layout.data * candidate.layout.context;
            (paper.layout.zero, paper.layout.shard) =
                if replicas > 1 { (3, replicas) } else { (0, 1) };
            let case = Case::new(&paper, cluster, options);
            let layers = Layers::of(&case);
            let bytes = room::needs_at_least(&case, &layers);
            (paper.layout.zero, paper.layout.shard) = (0, 1);
            if bytes > most {
                self.groups.push(Group { candidate, seconds: 0.0, bytes, layers, blocks: None });
                continue;
            }
            let blocks = Blocks::of(&Case::new(&paper, cluster, options));
            for order in space::orders(&paper.mesh(), cluster) {
                paper.layout.order = order;
                let seconds = compute_bound(&Case::new(&paper, cluster, options), &blocks);
                let layout = lockstep_plan::Layout { order, ..candidate.layout.clone() };
                let candidate = Candidate { layout, ..candidate };
                let blocks = Some(blocks);
                self.groups.push(Group { candidate, seconds, bytes, layers, blocks });
            }
        }
        let mut looked = self.looked.borrow_mut();
        looked.groups = self.groups.len();
        looked.infeasible = self.groups.iter().filter(|group| group.blocks.is_none()).count();
    }

    /// The `count` best layouts that fit, the best first; of equals the one that needs less memory or time, then
    /// the one that comes first in the order of the space.
    pub fn best(&self, by: Objective, count: usize, limits: &Limits) -> Vec<Proposal> {
        self.walk(by, count, limits, true)
    }

    /// The layout that comes closest to fitting.
    pub fn smallest(&self, limits: &Limits) -> Option<Proposal> {
        self.walk(Objective::Memory, 1, limits, false).pop()
    }

    /// A layout's estimate, made once.
    fn found(&self, leaf: &Candidate, number: (usize, usize)) -> Found {
        if let Some(found) = self.known.borrow().get(&number) {
            return *found;
        }
        self.looked.borrow_mut().estimated += 1;
        let mut paper = self.plan.clone();
        self.onto(leaf, &mut paper);
        let estimate = estimate(&paper, self.wanted.cluster, &self.options);
        let totals = estimate.stages.iter().map(|stage| stage.memory.total());
        let found = Found {
            seconds: estimate.step_s,
            bytes: totals.fold(0.0, f64::max),
            fits: estimate.fits,
        };
        self.known.borrow_mut().insert(number, found);
        found
    }

    /// A layout as a plan, or none where it would be refused.
    fn resolved(&self, leaf: &Candidate) -> Option<Plan> {
        let SearchRequest { config, vocab, cluster, .. } = *self.wanted;
        let env = cluster.environment(leaf.ranks, vocab);
        Plan::resolve(&leaf.typed(config), &env).ok()
    }

    /// Writes a layout into `paper`.
    fn onto(&self, candidate: &Candidate, paper: &mut Plan) {
        candidate.onto(paper);
        let env = self.wanted.cluster.environment(candidate.ranks, None);
        let typed = self.wanted.config.comm.overlap;
        paper.comm.overlap = Overlap::resolve(typed, &paper.mesh(), &env);
    }

    fn walk(&self, by: Objective, count: usize, limits: &Limits, fitting: bool) -> Vec<Proposal> {
        let walk = Walk { search: self, by, limits, fitting };
        let mut best = Best { count, list: Vec::new() };
        let mut heap = BinaryHeap::new();
        for (number, group) in self.groups.iter().enumerate() {
            if limits.allow_group(&group.candidate) && !(fitting && group.blocks.is_none()) {
                let bound = value(by, group.candidate.ranks, group.seconds, group.bytes);
                heap.push(Node { bound, number: (number, 0), leaf: None });
            }
        }
        while let Some(node) = heap.pop() {
            if node.bound > best.worst() {
                break;
            }
            if let Some(leaf) = &node.leaf {
                walk.look(leaf, node.number, &mut best);
                continue;
            }
            let mut opened = walk.open(node.number.0, best.worst());
            // The most promising at once, if it promises much: the sooner something good is known, the more need not
            // be looked at.
            let first = (0..opened.len()).max_by(|a, b| opened[*a].cmp(&opened[*b]));
            if let Some(first) =
                first.filter(|first| opened[*first].bound < PROMISING * best.worst())
            {
                let first = opened.swap_remove(first);
                first.leaf.iter().for_each(|leaf| walk.look(leaf, first.number, &mut best));
            }
            heap.extend(opened.into_iter().filter(|node| node.bound <= best.worst()));
        }
        best.list.into_iter().map(|(_, proposal)| proposal).collect()
    }
}

/// Of the worst of the best, what a bound must be below to be looked at out of turn.
const PROMISING: f64 = 0.95;

/// One walk through the groups.
struct Walk<'a> {
    search: &'a Search<'a>,
    by: Objective,
    limits: &'a Limits,
    /// Whether what does not fit is left out.
    fitting: bool,
}

impl Walk<'_> {
    /// The layouts of a group that may be better than `worst`.
    fn open(&self, number: usize, worst: f64) -> Vec<Node> {
        let Search { plan, wanted, .. } = self.search;
        let options = &self.search.options;
        let Group { candidate, blocks, layers, .. } = &self.search.groups[number];
        let (ranks, layout) = (candidate.ranks, &candidate.layout);
        let micros = plan.train.global_batch / candidate.micro_batch / layout.data;
        let cluster = &*wanted.cluster.shared(ranks, plan.train.threads);
        let available = available(cluster, &layout.mesh(&plan.model));
        let timed = blocks.as_ref().filter(|_| self.by != Objective::Memory);
        let mut looked = self.search.looked.borrow_mut();
        let mut paper = plan.clone();
        let mut opened = Vec::new();
        let mut index = 0;
        for scheduled in space::scheduled(candidate, plan.model.layers, micros) {
            self.search.onto(&scheduled, &mut paper);
            let at_least = timed
                .map_or(0.0, |blocks| passes_bound(&Case::new(&paper, cluster, options), blocks));
            let infeasible = value(self.by, ranks, at_least, 0.0) > worst;
            let replicas = layout.data * layout.context;
            if replicas > 1 {
                (paper.layout.zero, paper.layout.shard) = (3, replicas);
            }
            let room = Case::new(&paper, cluster, options);
            let too_large = self.fitting && room::infeasible(&room, layers, &available);
            for leaf in space::leaves(&scheduled) {
                index += 1;
                if infeasible || !self.limits.allow(&leaf) {
                    continue;
                }
                looked.layouts += 1;
                if too_large {
                    looked.too_large += 1;
                    continue;
                }
                self.search.onto(&leaf, &mut paper);
                let case = Case::new(&paper, cluster, options);
                let (bytes, over) = room::needs(&case, layers, &available);
                if self.fitting && over > 0.0 {
                    looked.too_large += 1;
                    continue;
                }
                let seconds = timed.map_or(0.0, |blocks| bound(&case, blocks));
                let bound = value(self.by, ranks, seconds, bytes);
                if bound <= worst {
                    opened.push(Node { bound, number: (number, index), leaf: Some(leaf) });
                }
            }
        }
        opened
    }

    /// Estimates a layout, and puts it where it belongs.
    fn look(&self, leaf: &Candidate, number: (usize, usize), best: &mut Best) {
        let found = self.search.found(leaf, number);
        let [value, other] =
            [self.by, self.by.other()].map(|by| value(by, leaf.ranks, found.seconds, found.bytes));
        let place = Place { value, other, number };
        if self.fitting && !found.fits || !best.takes(&place) {
            return;
        }
        // What every rule is for: nothing is proposed that would be refused.
        let Some(plan) = self.search.resolved(leaf) else { return };
        let estimate = estimate(&plan, self.search.wanted.cluster, &self.search.options);
        best.put(place, Proposal { plan, estimate });
    }
}

/// The best so far, in their order.
struct Best {
    count: usize,
    list: Vec<(Place, Proposal)>,
}

impl Best {
    /// What is above this is not among them.
    fn worst(&self) -> f64 {
        match self.count {
            0 => f64::NEG_INFINITY,
            count => self.list.get(count - 1).map_or(f64::INFINITY, |(place, _)| place.value),
        }
    }

    /// Whether a proposal at this place is among them.
    fn takes(&self, place: &Place) -> bool {
        self.list.len() < self.count || self.list.last().is_some_and(|(last, _)| place.before(last))
    }

    fn put(&mut self, place: Place, proposal: Proposal) {
        let at = self.list.partition_point(|(other, _)| other.before(&place));
        self.list.insert(at, (place, proposal));
        self.list.truncate(self.count);
    }
}

impl Objective {
    /// What decides between equals.
    fn other(self) -> Objective {
        match self {
            Objective::Memory => Objective::Time,
            _ => Objective::Memory,
        }
    }
}

/// Where a proposal stands among others.
struct Place {
    value: f64,
    other: f64,
    number: (usize, usize),
}

impl Place {
    fn before(&self, other: &Place) -> bool {
        let values = self.value.total_cmp(&other.value).then(self.other.total_cmp(&other.other));
        values.then(self.number.cmp(&other.number)) == Ordering::Less
    }
}

/// A group, or one layout of it: the lowest bound first.
struct Node {
    bound: f64,
    /// Of the group, and of the layout in it from 1 on.
    number: (usize, usize),
    leaf: Option<Candidate>,
}

impl Ord for Node {
    fn cmp(&self, other: &Node) -> Ordering {
        other.bound.total_cmp(&self.bound).then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Node {
    fn partial_cmp(&self, other: &Node) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Node {
    fn eq(&self, other: &Node) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Node {}
