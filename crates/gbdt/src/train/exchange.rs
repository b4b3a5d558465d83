//! Communication of a training: histograms and best splits.
//!
//! A histogram of S slots is reduced in one of two ways. Reduce-scatter: each rank gets the sums of its features, S/P
//! slots, searches them, and the ranks all-gather their best splits. All-reduce: every rank gets all sums and searches
//! all features. The cheaper one is chosen by the cost formulas of `comm`, with the time of the search.

use std::ops::Range;

use lockstep_comm::{
    Algo, BufferAccess, Collective, CollectiveShape, Group, LinkCosts, Op, Pending, Traffic,
    candidates, choose, predict_seconds, predict_traffic_with,
};

use crate::error::Result;
use crate::matrix::Layout;
use crate::train::split::Candidate;

/// How histograms are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// One rank: nothing is sent.
    None,
    Scatter,
    All,
}

/// Seconds to search one slot.
const SEARCH_SECONDS: f64 = 2e-9;

/// Reductions that take longer overlap with building the next histogram, in seconds.
const OVERLAP_FROM: f64 = 2e-3;

/// Communication of one training.
pub struct Exchange<'a> {
    group: &'a Group,
    pub rank: usize,
    pub reduction: Reduction,
    /// Whether a reduction overlaps with building the next histogram.
    pub overlaps: bool,
    /// Slots of a histogram, and of the part that this rank searches.
    slots: usize,
    pub own: Range<usize>,
    /// 64-bit words of a candidate.
    words: usize,
}

/// A reduction in progress: the used buffer and the sums of the features that this rank searches.
pub enum Reducing {
    Done { buffer: Vec<i64>, sums: Vec<i64> },
    Scatter(Pending<lockstep_comm::Result<(Vec<i64>, Vec<i64>)>>),
    All(Pending<lockstep_comm::Result<Vec<i64>>>),
}

impl<'a> Exchange<'a> {
    /// Chooses the reduction. The same on all ranks.
    pub fn new(group: &'a Group, layout: &Layout, set_words: usize) -> Exchange<'a> {
        let (slots, ranks) = (layout.slots(), group.size());
        let words = Candidate::words(set_words);
        let costs = group.link_costs();
        let seconds = |kind: Collective, count: usize| {
            let shape = CollectiveShape { kind, count, width: 8, root: 0, hosts: group.hosts() };
            predict_seconds(&shape, algorithm(&shape, &costs), &costs)
        };
        let search = SEARCH_SECONDS * slots as f64;
        let reduction = match ranks {
            1 => Reduction::None,
            _ => {
                let scatter = seconds(Collective::ReduceScatter, slots)
                    + seconds(Collective::AllGather, words * ranks)
                    + search / ranks as f64;
                let all = seconds(Collective::AllReduce, slots) + search;
                if all < scatter { Reduction::All } else { Reduction::Scatter }
            }
        };
        // On one host the ranks use all cores already, and another thread only takes time from them.
        let one_host = group.hosts().iter().all(|host| *host == group.hosts()[0]);
        let overlaps = !one_host && seconds(Collective::ReduceScatter, slots) > OVERLAP_FROM;
        Exchange::with(group, layout, set_words, reduction, overlaps)
    }

    /// Communication with a fixed reduction.
    pub fn with(
        group: &'a Group,
        layout: &Layout,
        set_words: usize,
        reduction: Reduction,
        overlaps: bool,
    ) -> Exchange<'a> {
        let (slots, width) = (layout.slots(), layout.width);
        let own = match reduction {
            Reduction::Scatter => group.rank() * width..(group.rank() + 1) * width,
            Reduction::None | Reduction::All => 0..slots,
        };
        let (rank, words) = (group.rank(), Candidate::words(set_words));
        Exchange { group, rank, reduction, overlaps, slots, own, words }
    }

    /// Starts to reduce a histogram, into `sums` where they are scattered. Collective.
    pub fn reduce(&self, mut buffer: Vec<i64>, mut sums: Vec<i64>) -> Result<Reducing> {
        if self.reduction == Reduction::Scatter {
            sums.resize(self.own.len(), 0);
        }
        Ok(match (self.reduction, self.overlaps) {
            (Reduction::None, _) => Reducing::Done { buffer: sums, sums: buffer },
            (Reduction::Scatter, false) => {
                self.group.reduce_scatter(&buffer, &mut sums, Op::Sum)?;
                Reducing::Done { buffer, sums }
            }
            (Reduction::All, false) => {
                self.group.all_reduce(&mut buffer, Op::Sum)?;
                Reducing::Done { buffer: sums, sums: buffer }
            }
            (Reduction::Scatter, true) => {
                Reducing::Scatter(self.group.start_reduce_scatter(buffer, sums, Op::Sum))
            }
            (Reduction::All, true) => Reducing::All(self.group.start_all_reduce(buffer, Op::Sum)),
        })
    }

    /// The best split of each node over all ranks. `mine` are the best ones of this rank's features. Collective.
    pub fn best(&self, mine: Vec<Option<Candidate>>) -> Result<Vec<Option<Candidate>>> {
        if self.reduction != Reduction::Scatter || mine.is_empty() {
            return Ok(mine);
        }
        let words = self.words;
        let mut encoded = vec![0; mine.len() * words];
        for (candidate, out) in mine.iter().zip(encoded.chunks_exact_mut(words)) {
            Candidate::encode(candidate.as_ref(), out);
        }
        let mut all = vec![0; encoded.len() * self.group.size()];
        self.group.all_gather(&encoded, &mut all)?;
        let best = |node: usize| {
            let of_rank = |theirs: &[i64]| Candidate::decode(&theirs[node * words..][..words]);
            all.chunks_exact(encoded.len())
                .filter_map(of_rank)
                .reduce(|best, other| if other.is_better(&best) { other } else { best })
        };
        Ok((0..mine.len()).map(best).collect())
    }

    /// Traffic of this rank for one histogram.
    pub fn of_histogram(&self, access: BufferAccess) -> Option<Traffic> {
        match self.reduction {
            Reduction::None => Some(Traffic::default()),
            Reduction::All => self.traffic(Collective::AllReduce, self.slots, access),
            Reduction::Scatter => self.traffic(Collective::ReduceScatter, self.slots, access),
        }
    }

    /// Traffic of this rank for the best splits of `nodes` nodes.
    pub fn of_search(&self, nodes: usize, access: BufferAccess) -> Option<Traffic> {
        match self.reduction {
            Reduction::Scatter => {
                let count = self.words * nodes * self.group.size();
                self.traffic(Collective::AllGather, count, access)
            }
            Reduction::None | Reduction::All => Some(Traffic::default()),
        }
    }

    /// Traffic of this rank for a collective of 64-bit numbers, by the formulas of `comm`.
    pub fn traffic(&self, kind: Collective, count: usize, access: BufferAccess) -> Option<Traffic> {
        let shape = CollectiveShape { kind, count, width: 8, root: 0, hosts: self.group.hosts() };
        let algo = algorithm(&shape, &self.group.link_costs());
        predict_traffic_with(&shape, algo, self.rank, access)
    }
}

/// The algorithm that a group uses: on one host always the direct one.
fn algorithm(shape: &CollectiveShape<'_>, costs: &LinkCosts) -> Algo {
    let one_host = shape.hosts.iter().all(|host| *host == shape.hosts[0]);
    if one_host && candidates(shape).contains(&Algo::Direct) {
        return Algo::Direct;
    }
    choose(shape, costs)
}

impl Reducing {
    /// Waits for the sums. Returns (used buffer, sums).
    pub fn wait(self) -> Result<(Vec<i64>, Vec<i64>)> {
        Ok(match self {
            Reducing::Done { buffer, sums } => (buffer, sums),
            Reducing::Scatter(pending) => {
                let (buffer, sums) = pending.wait()?;
                (buffer, sums)
            }
            Reducing::All(pending) => (Vec::new(), pending.wait()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Cuts, FeatureCuts};
    use lockstep_comm::on_threads;

    /// Every reduction, overlapped or not, gives a rank the sums of its slots.
    #[test]
    fn reductions_agree() {
        let thresholds: Vec<f32> = (0..20).map(|i| i as f32).collect();
        let feature = FeatureCuts { thresholds, present: 9, ..FeatureCuts::default() };
        let cuts = Cuts { features: vec![feature; 7] };
        for ranks in 2..5 {
            on_threads(ranks, |world| {
                let layout = Layout::new(&cuts, 9, ranks);
                for reduction in [Reduction::Scatter, Reduction::All] {
                    for overlaps in [false, true] {
                        let exchange = Exchange::with(&world, &layout, 0, reduction, overlaps);
                        let mine = |slot: usize| ((slot * 3) << world.rank()) as i64;
                        let buffer = (0..layout.slots()).map(mine).collect();
                        let (_, sums) =
                            exchange.reduce(buffer, Vec::new()).unwrap().wait().unwrap();
                        let factor = (1 << ranks) - 1;
                        let expected = exchange.own.clone().map(|slot| (slot * 3 * factor) as i64);
                        assert!(sums.into_iter().eq(expected), "{ranks} {reduction:?} {overlaps}");
                    }
                }
            });
        }
    }
}
