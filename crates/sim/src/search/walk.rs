//! Branch and bound over the groups of a search.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::candidate::Candidate;
use super::{Group, Limits, Objective, Proposal, Search, memory_bound, space, value};
use crate::case::Case;
use crate::estimate::{available, estimate};
use crate::step::{bound, passes_bound};

impl Search<'_> {
    /// The `count` best layouts; with `fitting`, only those that fit.
    pub(super) fn walk(
        &self,
        by: Objective,
        count: usize,
        limits: &Limits,
        fitting: bool,
    ) -> Vec<Proposal> {
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
                walk.evaluate(leaf, node.number, &mut best);
                continue;
            }
            let mut opened = walk.open(node.number.0, best.worst());
            // A very promising layout is evaluated at once: a good result early prunes more.
            let first = (0..opened.len()).max_by(|a, b| opened[*a].cmp(&opened[*b]));
            if let Some(first) =
                first.filter(|first| opened[*first].bound < PROMISING * best.worst())
            {
                let first = opened.swap_remove(first);
                first.leaf.iter().for_each(|leaf| walk.evaluate(leaf, first.number, &mut best));
            }
            heap.extend(opened.into_iter().filter(|node| node.bound <= best.worst()));
        }
        best.list.into_iter().map(|(_, proposal)| proposal).collect()
    }
}

/// A layout whose bound is below this fraction of the worst result is evaluated at once.
const PROMISING: f64 = 0.95;

/// One search through the groups.
struct Walk<'a> {
    search: &'a Search<'a>,
    by: Objective,
    limits: &'a Limits,
    /// Whether layouts that do not fit are excluded.
    fitting: bool,
}

impl Walk<'_> {
    /// Layouts of a group whose bound is not above `worst`.
    fn open(&self, number: usize, worst: f64) -> Vec<Node> {
        let Search { plan, request, .. } = self.search;
        let options = &self.search.options;
        let Group { candidate, blocks, layers, .. } = &self.search.groups[number];
        let (ranks, layout) = (candidate.ranks, &candidate.layout);
        let micros = plan.train.global_batch / candidate.micro_batch / layout.data;
        let cluster = &*request.cluster.for_rank(ranks, plan);
        let available = available(cluster, &layout.mesh(&plan.model));
        let timed = blocks.as_ref().filter(|_| self.by != Objective::Memory);
        let mut stats = self.search.stats.borrow_mut();
        let mut scratch = plan.clone();
        let mut opened = Vec::new();
        let mut index = 0;
        for scheduled in space::scheduled(candidate, plan.model.layers, micros) {
            self.search.write_to(&scheduled, &mut scratch);
            let at_least = timed
                .map_or(0.0, |blocks| passes_bound(&Case::new(&scratch, cluster, options), blocks));
            let infeasible = value(self.by, ranks, at_least, 0.0) > worst;
            let replicas = layout.data * layout.context;
            if replicas > 1 {
                (scratch.layout.zero, scratch.layout.shard) = (3, replicas);
            }
            let room = Case::new(&scratch, cluster, options);
            let too_large = self.fitting && memory_bound::infeasible(&room, layers, &available);
            for leaf in space::leaves(&scheduled) {
                index += 1;
                if infeasible || !self.limits.allow(&leaf) {
                    continue;
                }
                stats.layouts += 1;
                if too_large {
                    stats.too_large += 1;
                    continue;
                }
                self.search.write_to(&leaf, &mut scratch);
                let case = Case::new(&scratch, cluster, options);
                let (bytes, over) = memory_bound::needed(&case, layers, &available);
                if self.fitting && over > 0.0 {
                    stats.too_large += 1;
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

    /// Estimates a layout and inserts it into the results.
    fn evaluate(&self, leaf: &Candidate, number: (usize, usize), best: &mut Best) {
        let found = self.search.found(leaf, number);
        let [value, other] =
            [self.by, self.by.other()].map(|by| value(by, leaf.ranks, found.seconds, found.bytes));
        let key = SortKey { value, other, number };
        if self.fitting && !found.fits || !best.accepts(&key) {
            return;
        }
        // Only valid layouts are proposed.
        let Some(plan) = self.search.resolved(leaf) else { return };
        let estimate = estimate(&plan, self.search.request.cluster, &self.search.options);
        best.insert(key, Proposal { plan, estimate });
    }
}

/// The best layouts so far, in order.
struct Best {
    count: usize,
    list: Vec<(SortKey, Proposal)>,
}

impl Best {
    /// A layout above this value is not among the best.
    fn worst(&self) -> f64 {
        match self.count {
            0 => f64::NEG_INFINITY,
            count => self.list.get(count - 1).map_or(f64::INFINITY, |(key, _)| key.value),
        }
    }

    /// Whether a proposal with this key is among the best.
    fn accepts(&self, key: &SortKey) -> bool {
        self.list.len() < self.count || self.list.last().is_some_and(|(last, _)| key.before(last))
    }

    fn insert(&mut self, key: SortKey, proposal: Proposal) {
        let at = self.list.partition_point(|(other, _)| other.before(&key));
        self.list.insert(at, (key, proposal));
        self.list.truncate(self.count);
    }
}

impl Objective {
    /// The objective that breaks ties.
    fn other(self) -> Objective {
        match self {
            Objective::Memory => Objective::Time,
            _ => Objective::Memory,
        }
    }
}

/// Sort key of a proposal.
struct SortKey {
    value: f64,
    other: f64,
    number: (usize, usize),
}

impl SortKey {
    fn before(&self, other: &SortKey) -> bool {
        let values = self.value.total_cmp(&other.value).then(self.other.total_cmp(&other.other));
        values.then(self.number.cmp(&other.number)) == Ordering::Less
    }
}

/// A group, or one layout of it. Ordered by lowest bound first.
struct Node {
    bound: f64,
    /// Index of the group, and of the layout in it, counted from 1.
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
