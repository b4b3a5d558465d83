//! Growth of one tree: which nodes are split, and in which order their histograms are built and reduced.

use std::ops::Range;

use lockstep_kernels::Team;

use crate::error::Result;
use crate::matrix::Matrix;
use crate::model::{Split, Tree};
use crate::par;
use crate::params::{Growth, Params};
use crate::train::exchange::{Exchange, Reduction};
use crate::train::gradient::{Scales, hessian_of};
use crate::train::histogram::{self, Columns, Task};
use crate::train::partition::{Cut, Partition};
use crate::train::sample::ColumnSampler;
use crate::train::split::{self, Bounds, Candidate, Scorer, UNBOUNDED};

/// Inputs of growing a tree.
pub struct Grower<'a> {
    pub team: &'a Team,
    pub matrix: &'a Matrix,
    pub params: &'a Params,
    pub exchange: &'a Exchange<'a>,
    /// Monotone constraint of each feature; empty without constraints.
    pub monotone: &'a [i8],
    pub packed: &'a [i64],
    pub scales: Scales,
    /// Packed sum of all rows of all ranks.
    pub total: i64,
    /// Number of the tree, for sampling.
    pub number: u64,
}

/// A grown tree without leaf values: the rows and bounds of each leaf.
pub struct Grown {
    pub tree: Tree,
    pub leaves: Vec<Leaf>,
    /// Bounds of all nodes.
    pub bounds: Vec<Bounds>,
    /// Histograms that were reduced.
    pub reductions: usize,
    /// Nodes whose best splits were gathered, call by call.
    pub searches: Vec<usize>,
}

pub struct Leaf {
    pub node: usize,
    /// Positions in the partition.
    pub rows: Range<usize>,
}

/// A leaf that may be split.
struct Open {
    node: usize,
    depth: usize,
    rows: Range<usize>,
    total: i64,
    bounds: Bounds,
    /// Sums of the features that this rank searches.
    sums: Vec<i64>,
    best: Option<Candidate>,
}

/// Buffers that are reused by all trees of a training.
#[derive(Default)]
pub struct Buffers {
    histograms: Vec<Vec<i64>>,
    sums: Vec<Vec<i64>>,
}

/// Keeps a used buffer. Leaves that were not searched have none.
fn recycle(pool: &mut Vec<Vec<i64>>, buffer: Vec<i64>) {
    if !buffer.is_empty() {
        pool.push(buffer);
    }
}

/// Histograms that are built at a time by each thread.
const BATCH: usize = 2;

impl Grower<'_> {
    pub fn grow(&self, partition: &mut Partition, buffers: &mut Buffers) -> Result<Grown> {
        let (params, matrix) = (self.params, self.matrix);
        let scorer = Scorer::new(params, &self.scales);
        let sampler = ColumnSampler::new(params, self.number, matrix.features.len());
        let columns = Columns::new(matrix, &sampler.of_tree);
        let mut grown = Grown {
            tree: Tree::new(),
            leaves: Vec::new(),
            bounds: vec![UNBOUNDED],
            reductions: 0,
            searches: Vec::new(),
        };
        partition.reset();
        let mut root = vec![Open {
            node: 0,
            depth: 0,
            rows: 0..matrix.rows,
            total: self.total,
            bounds: UNBOUNDED,
            sums: Vec::new(),
            best: None,
        }];
        if self.may_split(&scorer, &root[0]) {
            let all = std::iter::once(0..matrix.rows).collect::<Vec<_>>();
            let sums = self.histograms(&columns, partition, &all, buffers)?;
            grown.reductions += 1;
            root[0].sums = sums.into_iter().next().expect("one histogram was built");
            self.search(&scorer, &sampler, &mut root, &mut grown)?;
        }
        let mut open = root;
        loop {
            let chosen = self.choose(&mut open, &mut grown, buffers);
            if chosen.is_empty() {
                break;
            }
            let children = self.split(&scorer, chosen, partition, &mut grown);
            let mut next =
                self.child_sums(&scorer, &columns, (partition, buffers), children, &mut grown)?;
            self.search(&scorer, &sampler, &mut next, &mut grown)?;
            open.extend(next);
        }
        Ok(grown)
    }

    /// Whether a leaf may be split at all. The same on all ranks.
    fn may_split(&self, scorer: &Scorer, leaf: &Open) -> bool {
        let deep = self.params.max_depth > 0 && leaf.depth >= self.params.max_depth;
        !deep && scorer.can_split(leaf.total)
    }

    /// The leaves to split next; leaves that are not split any more are finished.
    fn choose(&self, open: &mut Vec<Open>, grown: &mut Grown, buffers: &mut Buffers) -> Vec<Open> {
        let mut finish = |leaf: Open, grown: &mut Grown| {
            recycle(&mut buffers.sums, leaf.sums);
            grown.leaves.push(Leaf { node: leaf.node, rows: leaf.rows });
        };
        let (mut ready, mut rest): (Vec<Open>, Vec<Open>) =
            open.drain(..).partition(|leaf| leaf.best.is_some());
        rest.drain(..).for_each(|leaf| finish(leaf, grown));
        let gain = |leaf: &Open| leaf.best.as_ref().map_or(0.0, |best| best.gain);
        let by_gain = |one: &Open, other: &Open| {
            gain(other).total_cmp(&gain(one)).then(one.node.cmp(&other.node))
        };
        let leaves = grown.leaves.len() + ready.len();
        let room = match self.params.max_leaves {
            0 => usize::MAX,
            most => most.saturating_sub(leaves),
        };
        let count = match self.params.grow {
            Growth::Depth => room,
            Growth::Loss => room.min(1),
        };
        if count < ready.len() {
            ready.sort_by(by_gain);
            rest = ready.split_off(count);
        }
        // A level is complete: leaves without room stay leaves.
        if self.params.grow == Growth::Depth || room == 0 {
            rest.drain(..).for_each(|leaf| finish(leaf, grown));
        }
        *open = rest;
        ready.sort_by_key(|leaf| leaf.node);
        ready
    }

    /// Splits leaves: extends the tree and divides the rows. Returns (parent's sums, left, right).
    fn split(
        &self,
        scorer: &Scorer,
        chosen: Vec<Open>,
        partition: &mut Partition,
        grown: &mut Grown,
    ) -> Vec<(Vec<i64>, Open, Open)> {
        let mut cuts = Vec::new();
        let mut nodes = Vec::new();
        for leaf in &chosen {
            let best = leaf.best.as_ref().expect("only leaves with a split are chosen");
            let feature = &self.matrix.cuts.features[best.feature as usize];
            let categories = best.right_categories(feature.categories);
            let threshold = if categories.is_some() { 0.0 } else { feature.threshold(best.bin) };
            let split = Split {
                feature: best.feature,
                threshold,
                default_left: best.default_left,
                gain: best.gain as f32,
                categories,
            };
            nodes.push(grown.tree.split(leaf.node, split));
            let table = crate::model::goes_left(&grown.tree, leaf.node, feature.bins(), best.bin);
            let feature = best.feature as usize;
            cuts.push(Cut { rows: leaf.rows.clone(), feature, goes_left: table });
        }
        let middles = partition.split(self.team, self.matrix, &cuts);
        let mut children = Vec::new();
        for ((leaf, (left, right)), middle) in chosen.into_iter().zip(nodes).zip(middles) {
            let best = leaf.best.expect("only leaves with a split are chosen");
            let (low, high) = self.child_bounds(scorer, &leaf.bounds, leaf.total, &best);
            let child = |node, rows, total, bounds| Open {
                node,
                depth: leaf.depth + 1,
                rows,
                total,
                bounds,
                sums: Vec::new(),
                best: None,
            };
            grown.bounds.resize(grown.tree.nodes(), UNBOUNDED);
            (grown.bounds[left], grown.bounds[right]) = (low, high);
            children.push((
                leaf.sums,
                child(left, leaf.rows.start..middle, best.left, low),
                child(right, middle..leaf.rows.end, leaf.total - best.left, high),
            ));
        }
        children
    }

    /// Bounds of the leaf values below the children of a split.
    fn child_bounds(
        &self,
        scorer: &Scorer,
        bounds: &Bounds,
        total: i64,
        best: &Candidate,
    ) -> (Bounds, Bounds) {
        let direction = self.monotone.get(best.feature as usize).copied().unwrap_or(0);
        if direction == 0 {
            return (*bounds, *bounds);
        }
        let (left, right) = scorer.child_weights(total, best.left, *bounds);
        let middle = (left + right) / 2.0;
        let (below, above) =
            (Bounds { high: middle, ..*bounds }, Bounds { low: middle, ..*bounds });
        if direction > 0 { (below, above) } else { (above, below) }
    }

    /// Sums of the children: one is built from its rows, the other one is the difference to the parent.
    fn child_sums(
        &self,
        scorer: &Scorer,
        columns: &Columns,
        (partition, buffers): (&Partition, &mut Buffers),
        children: Vec<(Vec<i64>, Open, Open)>,
        grown: &mut Grown,
    ) -> Result<Vec<Open>> {
        let needed = |child: &Open| self.may_split(scorer, child);
        // The child with fewer rows, judged by the hessians of all ranks.
        let builds_left =
            |left: &Open, right: &Open| hessian_of(left.total) <= hessian_of(right.total);
        let built: Vec<Range<usize>> = children
            .iter()
            .filter(|(_, left, right)| needed(left) || needed(right))
            .map(|(_, left, right)| match builds_left(left, right) {
                true => left.rows.clone(),
                false => right.rows.clone(),
            })
            .collect();
        grown.reductions += built.len();
        let mut sums = self.histograms(columns, partition, &built, buffers)?.into_iter();
        let mut open = Vec::new();
        for (mut parent, mut left, mut right) in children {
            if !needed(&left) && !needed(&right) {
                recycle(&mut buffers.sums, parent);
            } else {
                let small = sums.next().expect("a histogram was built for each pair");
                self.subtract(&mut parent, &small);
                let is_left = builds_left(&left, &right);
                let (built, other) =
                    if is_left { (&mut left, &mut right) } else { (&mut right, &mut left) };
                built.sums = small;
                other.sums = parent;
            }
            open.extend([left, right]);
        }
        Ok(open)
    }

    fn subtract(&self, parent: &mut [i64], small: &[i64]) {
        let len = self.exchange.own.len();
        let parts = par::pieces(len, 1 << 15, 4 * self.team.size());
        let target = par::Disjoint::new(parent);
        par::for_each(self.team, parts.len(), &|part| {
            // SAFETY: the parts are disjoint.
            let out = unsafe { target.range(parts[part].clone()) };
            out.iter_mut().zip(&small[parts[part].clone()]).for_each(|(out, x)| *out -= x);
        });
    }

    /// Builds and reduces the histograms of some nodes.
    fn histograms(
        &self,
        columns: &Columns,
        partition: &Partition,
        nodes: &[Range<usize>],
        buffers: &mut Buffers,
    ) -> Result<Vec<Vec<i64>>> {
        let (mut done, mut in_flight) = (Vec::new(), Vec::new());
        let keep = |(buffer, sums): (Vec<i64>, Vec<i64>),
                    done: &mut Vec<Vec<i64>>,
                    buffers: &mut Buffers| {
            done.push(sums);
            match self.exchange.reduction {
                Reduction::Scatter => recycle(&mut buffers.histograms, buffer),
                _ => recycle(&mut buffers.sums, buffer),
            }
        };
        for batch in nodes.chunks(if self.team.size() == 1 { 1 } else { BATCH * self.team.size() })
        {
            let tasks: Vec<Task> = batch.iter().map(|rows| Task { rows: rows.clone() }).collect();
            let mut out: Vec<Vec<i64>> = batch.iter().map(|_| self.zeroed(buffers)).collect();
            let input = (&partition.rows[..], self.packed);
            histogram::build(self.team, self.matrix, columns, input, &tasks, &mut out);
            // At most one batch is in flight while the next one is built.
            for reducing in in_flight.drain(..) {
                keep(crate::train::exchange::Reducing::wait(reducing)?, &mut done, buffers);
            }
            for buffer in out {
                let sums = match self.exchange.reduction {
                    Reduction::Scatter => buffers.sums.pop().unwrap_or_default(),
                    _ => Vec::new(),
                };
                in_flight.push(self.exchange.reduce(buffer, sums)?);
            }
        }
        for reducing in in_flight {
            keep(reducing.wait()?, &mut done, buffers);
        }
        Ok(done)
    }

    /// A zeroed histogram, from a used buffer if there is one.
    fn zeroed(&self, buffers: &mut Buffers) -> Vec<i64> {
        let from = match self.exchange.reduction {
            Reduction::Scatter => &mut buffers.histograms,
            _ => &mut buffers.sums,
        };
        match from.pop() {
            Some(mut buffer) => {
                buffer.fill(0);
                buffer
            }
            None => histogram::zeroed(self.matrix),
        }
    }

    /// Finds the best split of each leaf. Collective.
    fn search(
        &self,
        scorer: &Scorer,
        sampler: &ColumnSampler<'_>,
        leaves: &mut [Open],
        grown: &mut Grown,
    ) -> Result<()> {
        let candidates: Vec<usize> =
            (0..leaves.len()).filter(|leaf| self.may_split(scorer, &leaves[*leaf])).collect();
        if candidates.is_empty() {
            return Ok(());
        }
        let features = match self.exchange.reduction {
            Reduction::Scatter => self.matrix.layout.blocks[self.exchange.rank].clone(),
            _ => 0..self.matrix.features.len(),
        };
        let parts = par::pieces(features.len(), 16, 4 * self.team.size());
        let used: Vec<Vec<bool>> = candidates
            .iter()
            .map(|leaf| sampler.of_node(leaves[*leaf].depth, leaves[*leaf].node))
            .collect();
        let found = par::map(self.team, candidates.len() * parts.len(), &|task| {
            let (index, part) = (task / parts.len(), &parts[task % parts.len()]);
            let leaf = &leaves[candidates[index]];
            let node = split::Node {
                histogram: &leaf.sums,
                first_slot: self.exchange.own.start,
                total: leaf.total,
                bounds: leaf.bounds,
            };
            let mut best: Option<Candidate> = None;
            let mine = features.start + part.start..features.start + part.end;
            for feature in mine.filter(|feature| used[index][*feature]) {
                let monotone = self.monotone.get(feature).copied().unwrap_or(0);
                let found = split::best_split(self.matrix, feature, &node, scorer, monotone);
                if let Some(found) = found
                    && best.as_ref().is_none_or(|best| found.is_better(best))
                {
                    best = Some(found);
                }
            }
            best
        });
        let best = found.chunks(parts.len()).map(|parts| {
            parts
                .iter()
                .flatten()
                .cloned()
                .reduce(|best, other| if other.is_better(&best) { other } else { best })
        });
        let best = self.exchange.best(best.collect())?;
        grown.searches.push(candidates.len());
        for (leaf, best) in candidates.into_iter().zip(best) {
            leaves[leaf].best = best;
        }
        Ok(())
    }
}
