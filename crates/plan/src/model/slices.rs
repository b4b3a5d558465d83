//! The slices of tensors that a rank holds, by their positions in the whole tensors, and those that it writes into a
//! checkpoint. They depend on the rank's part alone, so every rank and every reader computes the same.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Param, Part, Split};
use crate::cut;

/// Runs of equal length in a flattened tensor, at equal distances. A few rows of a matrix are one run; a few columns
/// are one run per row.
///
/// ```
/// use lockstep_plan::model::Runs;
/// let columns = Runs { start: 2, len: 2, stride: 6, count: 3 }; // columns 2 and 3 of (3, 6)
/// assert_eq!(columns.ranges().collect::<Vec<_>>(), [2..4, 8..10, 14..16]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(from = "[usize; 4]", into = "[usize; 4]")]
pub struct Runs {
    pub start: usize,
    /// Length of each run.
    pub len: usize,
    /// Distance between the starts of two runs.
    pub stride: usize,
    pub count: usize,
}

impl From<[usize; 4]> for Runs {
    fn from([start, len, stride, count]: [usize; 4]) -> Runs {
        Runs { start, len, stride, count }
    }
}

impl From<Runs> for [usize; 4] {
    fn from(runs: Runs) -> [usize; 4] {
        [runs.start, runs.len, runs.stride, runs.count]
    }
}

impl Runs {
    /// A single run.
    pub fn one(range: Range<usize>) -> Runs {
        Runs { start: range.start, len: range.len(), stride: 0, count: 1 }
    }

    /// Total number of elements.
    pub fn elements(&self) -> usize {
        self.len * self.count
    }

    pub fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        let Runs { start, len, stride, count } = self;
        (0..count).map(move |run| start + run * stride..start + run * stride + len)
    }

    /// Elements `range` of the concatenated runs: the end of a run, whole runs, the beginning of a run.
    pub fn part(self, range: Range<usize>) -> Vec<Runs> {
        let Runs { start, len, stride, .. } = self;
        let (mut parts, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let (first, within) = (start + at / len * stride, at % len);
            let whole = if within == 0 { (range.end - at) / len } else { 0 };
            let part = match whole {
                0 => {
                    let rest = (len - within).min(range.end - at);
                    Runs::one(first + within..first + within + rest)
                }
                1 => Runs::one(first..first + len),
                count => Runs { start: first, len, stride, count },
            };
            at += part.elements();
            parts.push(part);
        }
        parts
    }
}

/// The common elements of two slices of a tensor: offset in the first slice, offset in the second, length. Both slices
/// are in the order of the tensor.
pub fn overlaps(one: &[Runs], other: &[Runs]) -> Vec<(usize, usize, usize)> {
    let (mut ones, mut others) = (placed(one), placed(other));
    let (mut a, mut b) = (ones.next(), others.next());
    let mut common = Vec::new();
    while let (Some((at_a, run_a)), Some((at_b, run_b))) = (&a, &b) {
        let (from, to) = (run_a.start.max(run_b.start), run_a.end.min(run_b.end));
        if from < to {
            common.push((at_a + from - run_a.start, at_b + from - run_b.start, to - from));
        }
        match run_a.end <= run_b.end {
            true => a = ones.next(),
            false => b = others.next(),
        }
    }
    common
}

/// Each run with its offset among the elements of all runs.
fn placed(runs: &[Runs]) -> impl Iterator<Item = (usize, Range<usize>)> {
    runs.iter().flat_map(|runs| runs.ranges()).scan(0, |end, run| {
        let at = *end;
        *end += run.len();
        Some((at, run))
    })
}

/// A rank's slice of a tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Slice {
    /// Index among the rank's blocks.
    pub block: usize,
    pub unit: usize,
    /// Name and dimensions of the whole tensor.
    pub name: String,
    pub dims: Vec<usize>,
    /// Range in the rank's shard of the unit.
    pub here: Range<usize>,
    /// Positions of its elements in the whole tensor, in the same order.
    pub runs: Vec<Runs>,
}

impl Slice {
    /// Elements `range` of the slice.
    fn part(&self, range: Range<usize>) -> Slice {
        let here = self.here.start + range.start..self.here.start + range.end;
        let (mut runs, mut before) = (Vec::new(), 0);
        for part in &self.runs {
            let end = before + part.elements();
            let (from, to) = (range.start.max(before), range.end.min(end));
            if from < to {
                runs.extend(part.part(from - before..to - before));
            }
            before = end;
        }
        Slice { here, runs, ..self.clone() }
    }
}

impl Param {
    /// Position of this rank's slice in the whole tensor.
    pub fn place(&self) -> Runs {
        let mut runs = self.runs();
        let Some((start, first)) = runs.next() else { return Runs::one(0..0) };
        match runs.next() {
            None => Runs::one(start..start + first.len()),
            Some((second, _)) => {
                let count = self.len() / first.len();
                Runs { start, len: first.len(), stride: second - start, count }
            }
        }
    }
}

impl Part {
    /// The slices whose optimizer state this rank holds.
    pub fn slices(&self) -> Vec<Slice> {
        self.held_slices().into_iter().map(|(slice, _)| slice).collect()
    }

    /// The slices that this rank writes into a checkpoint. Ranks that hold the same slice write an equal share each,
    /// so every element of every tensor is written once.
    pub fn written(&self) -> Vec<Slice> {
        let held = self.held_slices();
        let mut totals: BTreeMap<Holders, usize> = BTreeMap::new();
        for (slice, holders) in &held {
            *totals.entry(*holders).or_default() += slice.here.len();
        }
        // The concatenated slices of the same holders are divided among them: few slices are cut, and the shares
        // are even.
        let mut before: BTreeMap<Holders, usize> = BTreeMap::new();
        let mut written = Vec::new();
        for (slice, holders) in held {
            let start = before.entry(holders).or_default();
            let share = cut(totals[&holders], holders.count, holders.index);
            let (from, to) = (share.start.max(*start), share.end.min(*start + slice.here.len()));
            if from < to {
                written.push(slice.part(from - *start..to - *start));
            }
            *start += slice.here.len();
        }
        written
    }

    fn held_slices(&self) -> Vec<(Slice, Holders)> {
        let mut all = Vec::new();
        for (block, (params, units)) in self.blocks.iter().zip(&self.shards).enumerate() {
            for (unit, shard) in units.iter().enumerate() {
                for (start, param) in params.placed() {
                    let Some(here) = shard.within(start..start + param.len()) else { continue };
                    let from = shard.own.start + here.start - start;
                    let runs = param.place().part(from..from + here.len());
                    let (name, dims) = (param.whole.name.clone(), param.whole.dims.clone());
                    let slice = Slice { block, unit, name, dims, here, runs };
                    all.push((slice, self.holders(param)));
                }
            }
        }
        all
    }

    /// The ranks that hold the same slice of a parameter.
    fn holders(&self, param: &Param) -> Holders {
        let Part { mesh, coord, .. } = self;
        let sharers = match param.expert {
            Some(_) => mesh.expert * mesh.expert_shard(),
            None => mesh.shard,
        };
        let copies = (mesh.replicas() / sharers, mesh.replica(*coord) / sharers);
        let on_tensor = match param.split {
            Split::Replicated | Split::Norm => (mesh.tensor, coord.tensor),
            Split::Keys => (mesh.keys, coord.tensor % mesh.keys),
            Split::Rows | Split::Cols | Split::Vocab => (1, 0),
        };
        let ends = if param.tied { (2, usize::from(coord.pipe > 0)) } else { (1, 0) };
        Holders {
            kind: (param.expert.is_some(), on_tensor.0, ends.0),
            count: copies.0 * on_tensor.0 * ends.0,
            index: (copies.1 * on_tensor.0 + on_tensor.1) * ends.0 + ends.1,
        }
    }

    /// Whether this rank's compression residual of a parameter's gradient (see `comm.compression`) is added to those
    /// of other ranks. Where ranks of the tensor axis compute the same gradient, one of them counts.
    pub fn counts_residual(&self, param: &Param, sequence: bool) -> bool {
        !param.same_on_tensor(sequence) || self.coord.tensor == 0
    }

    /// Whether this rank takes over the summed residual of a parameter's gradient from another layout: one of the
    /// ranks whose gradients are summed, and all that compute the same gradient.
    pub fn takes_residual(&self, param: &Param, sequence: bool) -> bool {
        let Part { mesh, coord, .. } = self;
        let first_replica = match param.expert {
            Some(_) => mesh.replica(*coord) < mesh.expert,
            None => mesh.replica(*coord) == 0,
        };
        let first_of_tensor = match param.split {
            Split::Norm if sequence => coord.tensor == 0,
            Split::Keys => coord.tensor.is_multiple_of(mesh.keys),
            _ => true,
        };
        first_replica && first_of_tensor && (!param.tied || coord.pipe == 0)
    }
}

/// The ranks that hold the same slice, and the index of this rank among them. Holders of one kind hold the same
/// slices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Holders {
    kind: (bool, usize, usize),
    count: usize,
    index: usize,
}
