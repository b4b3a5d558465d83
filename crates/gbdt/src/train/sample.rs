//! Row and column sampling. Every choice is a function of (seed, tree, row) or (seed, tree, level or node, feature), so
//! it does not depend on the ranks.

use lockstep_kernels::{RandomKey, Team};

use crate::par::{Disjoint, for_each, pieces};
use crate::params::Params;
use crate::train::gradient::Pair;

// Kinds of choices, in the upper bits of the stream.
const ROWS: u64 = 1 << 60;
const TREE: u64 = 2 << 60;
const LEVEL: u64 = 3 << 60;
const NODE: u64 = 4 << 60;

/// Sets the pairs of rows that tree `tree` does not use to zero. `first_row` is the global number of the first row.
pub fn sample_rows(team: &Team, params: &Params, tree: u64, first_row: u64, pairs: &mut [Pair]) {
    if params.subsample >= 1.0 {
        return;
    }
    let key = RandomKey { seed: params.seed, stream: ROWS | tree };
    let limit = (params.subsample * (1u64 << 32) as f64) as u64;
    let parts = pieces(pairs.len(), 1 << 14, usize::MAX);
    let pairs = Disjoint::new(pairs);
    for_each(team, parts.len(), &|part| {
        // SAFETY: the parts are disjoint.
        let mine = unsafe { pairs.range(parts[part].clone()) };
        for (row, pair) in parts[part].clone().zip(mine) {
            if u64::from(key.word(first_row + row as u64)) >= limit {
                *pair = Pair::default();
            }
        }
    });
}

/// The features that a tree, a level and a node may use.
pub struct ColumnSampler<'a> {
    params: &'a Params,
    tree: u64,
    /// Whether the tree uses each feature.
    pub of_tree: Vec<bool>,
}

impl<'a> ColumnSampler<'a> {
    pub fn new(params: &'a Params, tree: u64, features: usize) -> ColumnSampler<'a> {
        let all = vec![true; features];
        let stream = TREE | tree;
        let of_tree = choose(params.seed, stream, &all, params.colsample_bytree);
        ColumnSampler { params, tree, of_tree }
    }

    /// Whether a node may use each feature.
    pub fn of_node(&self, depth: usize, node: usize) -> Vec<bool> {
        let (seed, tree) = (self.params.seed, self.tree);
        let level = choose(
            seed,
            LEVEL | tree << 16 | depth as u64,
            &self.of_tree,
            self.params.colsample_bylevel,
        );
        choose(seed, NODE | tree << 24 | node as u64, &level, self.params.colsample_bynode)
    }
}

/// A fraction of the features of a set, at least one: those with the smallest random numbers.
fn choose(seed: u64, stream: u64, from: &[bool], fraction: f64) -> Vec<bool> {
    if fraction >= 1.0 {
        return from.to_vec();
    }
    let key = RandomKey { seed, stream };
    let features = (0..from.len()).filter(|feature| from[*feature]);
    let mut order: Vec<(u32, usize)> =
        features.map(|feature| (key.word(feature as u64), feature)).collect();
    order.sort_unstable();
    let count = ((order.len() as f64 * fraction).floor() as usize).max(1).min(order.len());
    let mut chosen = vec![false; from.len()];
    order[..count].iter().for_each(|(_, feature)| chosen[*feature] = true);
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_of_columns() {
        let params = Params { colsample_bytree: 0.5, colsample_bynode: 0.5, ..Params::default() };
        let sampler = ColumnSampler::new(&params, 3, 20);
        let count = |set: &[bool]| set.iter().filter(|used| **used).count();
        assert_eq!(count(&sampler.of_tree), 10);
        let (one, other) = (sampler.of_node(1, 1), sampler.of_node(1, 2));
        assert_eq!((count(&one), count(&other)), (5, 5));
        assert_ne!(one, other);
        assert!(one.iter().zip(&sampler.of_tree).all(|(node, tree)| !node || *tree));
    }

    #[test]
    fn row_samples_do_not_depend_on_the_shard() {
        let params = Params { subsample: 0.3, ..Params::default() };
        let sample = |first: u64, count: usize| {
            let mut pairs = vec![Pair { g: 1.0, h: 1.0 }; count];
            sample_rows(&Team::new(2), &params, 5, first, &mut pairs);
            pairs.iter().map(|pair| pair.h > 0.0).collect::<Vec<bool>>()
        };
        let whole = sample(0, 10_000);
        assert_eq!(whole, [sample(0, 3333), sample(3333, 6667)].concat());
        let used = whole.iter().filter(|used| **used).count();
        assert!((2800..3200).contains(&used), "{used}");
    }
}
