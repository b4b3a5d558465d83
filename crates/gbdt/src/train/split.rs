//! The best split of a node, from its histogram. All arithmetic starts from integer sums, so every rank finds the same
//! gain for the same split.

use crate::matrix::{FeatureCuts, Matrix, Storage};
use crate::params::Params;
use crate::train::gradient::{Scales, gradient_of, hessian_of};

/// A possible split. `left` is the packed sum of the rows that go left.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub gain: f64,
    pub feature: u32,
    /// The last bin that goes left; -1 if only missing values do.
    pub bin: i32,
    pub default_left: bool,
    pub left: i64,
    /// Bits of the categories that go right; empty for a numeric feature.
    pub right_set: Vec<u64>,
}

impl Candidate {
    /// Whether this one is chosen over another: by gain, then by the lower feature.
    pub fn is_better(&self, other: &Candidate) -> bool {
        self.gain > other.gain || (self.gain == other.gain && self.feature < other.feature)
    }

    /// Number of 64-bit words of a candidate, for sets of `set` words.
    pub fn words(set: usize) -> usize {
        4 + set
    }

    /// Writes a candidate, or none.
    pub fn encode(candidate: Option<&Candidate>, out: &mut [i64]) {
        out.fill(0);
        let Some(candidate) = candidate else {
            out[1] = -1;
            return;
        };
        out[0] = candidate.gain.to_bits() as i64;
        out[1] = i64::from(candidate.feature);
        out[2] = i64::from(candidate.bin) << 2
            | i64::from(!candidate.right_set.is_empty()) << 1
            | i64::from(candidate.default_left);
        out[3] = candidate.left;
        for (out, word) in out[4..].iter_mut().zip(&candidate.right_set) {
            *out = *word as i64;
        }
    }

    pub fn decode(words: &[i64]) -> Option<Candidate> {
        let categorical = words[2] & 2 != 0;
        (words[1] >= 0).then(|| Candidate {
            gain: f64::from_bits(words[0] as u64),
            feature: words[1] as u32,
            bin: (words[2] >> 2) as i32,
            default_left: words[2] & 1 != 0,
            left: words[3],
            right_set: match categorical {
                true => words[4..].iter().map(|word| *word as u64).collect(),
                false => Vec::new(),
            },
        })
    }

    /// The categories that go right.
    pub fn right_categories(&self, categories: usize) -> Option<Vec<u32>> {
        let contains = |code: &u32| self.right_set[*code as usize / 64] >> (code % 64) & 1 == 1;
        (!self.right_set.is_empty()).then(|| (0..categories as u32).filter(contains).collect())
    }
}

/// Bounds of leaf values below a node, from monotone constraints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    pub low: f64,
    pub high: f64,
}

pub const UNBOUNDED: Bounds = Bounds { low: f64::NEG_INFINITY, high: f64::INFINITY };

/// Gains and leaf values.
#[derive(Clone, Copy)]
pub struct Scorer {
    lambda: f64,
    alpha: f64,
    min_child_weight: f64,
    min_gain: f64,
    unit_g: f64,
    unit_h: f64,
}

/// Smallest gain of a split if `gamma` is 0, as in XGBoost.
const MIN_GAIN: f64 = 1e-6;

impl Scorer {
    pub fn new(params: &Params, scales: &Scales) -> Scorer {
        Scorer {
            lambda: params.lambda,
            alpha: params.alpha,
            min_child_weight: params.min_child_weight,
            min_gain: params.gamma.max(MIN_GAIN),
            unit_g: 1.0 / scales.g,
            unit_h: 1.0 / scales.h,
        }
    }

    fn sums(&self, packed: i64) -> (f64, f64) {
        (gradient_of(packed) as f64 * self.unit_g, hessian_of(packed) as f64 * self.unit_h)
    }

    /// Soft threshold of L1 regularization.
    fn shrink(&self, g: f64) -> f64 {
        match g {
            g if g > self.alpha => g - self.alpha,
            g if g < -self.alpha => g + self.alpha,
            _ => 0.0,
        }
    }

    /// Value of a leaf without the learning rate.
    pub fn weight(&self, g: f64, h: f64, bounds: Bounds) -> f64 {
        if h + self.lambda <= 0.0 {
            return 0.0;
        }
        (-self.shrink(g) / (h + self.lambda)).clamp(bounds.low, bounds.high)
    }

    /// Loss reduction of a leaf with its best value within the bounds.
    fn score(&self, g: f64, h: f64, bounds: Bounds) -> f64 {
        if h + self.lambda <= 0.0 {
            return 0.0;
        }
        if bounds == UNBOUNDED {
            let g = self.shrink(g);
            return g * g / (h + self.lambda);
        }
        let weight = self.weight(g, h, bounds);
        -(2.0 * g * weight + (h + self.lambda) * weight * weight + 2.0 * self.alpha * weight.abs())
    }

    /// Whether a node with this sum may have two children.
    pub fn can_split(&self, packed: i64) -> bool {
        let h = hessian_of(packed) as f64 * self.unit_h;
        h > 0.0 && h >= 2.0 * self.min_child_weight
    }

    /// Values of the children of a split, for the bounds of monotone constraints.
    pub fn child_weights(&self, total: i64, left: i64, bounds: Bounds) -> (f64, f64) {
        let weight = |packed: i64| {
            let (g, h) = self.sums(packed);
            self.weight(g, h, bounds)
        };
        (weight(left), weight(total - left))
    }
}

/// A node as the search sees it.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    /// Slots of the histogram from `first_slot` on.
    pub histogram: &'a [i64],
    pub first_slot: usize,
    pub total: i64,
    pub bounds: Bounds,
}

/// The best split of a node by one feature.
pub fn best_split(
    matrix: &Matrix,
    feature: usize,
    node: &Node<'_>,
    scorer: &Scorer,
    monotone: i8,
) -> Option<Candidate> {
    let slots = matrix.layout.range(feature);
    let histogram = &node.histogram[slots.start - node.first_slot..slots.end - node.first_slot];
    let cuts = &matrix.cuts.features[feature];
    let bins = cuts.bins();
    let missing = match matrix.layout.storage[feature] {
        Storage::Sparse => node.total - histogram.iter().sum::<i64>(),
        _ if cuts.missing => histogram[bins],
        _ => 0,
    };
    let mut search = Search::new(scorer, node, monotone);
    match cuts.categories {
        0 if search.is_plain() => search.plain(&histogram[..bins], missing),
        0 => search.numeric(&histogram[..bins], missing),
        _ => search.categorical(&histogram[..bins], missing),
    }
    search.finish(feature, cuts)
}

/// Search over the splits of one feature.
struct Search<'a> {
    scorer: &'a Scorer,
    total: i64,
    bounds: Bounds,
    monotone: i8,
    parent: f64,
    best: Option<(f64, i32, bool, i64)>,
    /// Categories in the order in which they were tried.
    order: Vec<u32>,
}

impl<'a> Search<'a> {
    fn new(scorer: &'a Scorer, node: &Node<'_>, monotone: i8) -> Search<'a> {
        let (g, h) = scorer.sums(node.total);
        let parent = scorer.score(g, h, node.bounds);
        let (total, bounds) = (node.total, node.bounds);
        Search { scorer, total, bounds, monotone, parent, best: None, order: Vec::new() }
    }

    /// Considers the split after `bin`.
    #[inline]
    fn consider(&mut self, left: i64, bin: i32, default_left: bool) {
        let scorer = self.scorer;
        let (gl, hl) = scorer.sums(left);
        let (gr, hr) = scorer.sums(self.total - left);
        if hl < scorer.min_child_weight || hr < scorer.min_child_weight || hl <= 0.0 || hr <= 0.0 {
            return;
        }
        if self.monotone != 0 {
            let difference =
                scorer.weight(gr, hr, self.bounds) - scorer.weight(gl, hl, self.bounds);
            if difference * f64::from(self.monotone) < 0.0 {
                return;
            }
        }
        let gain = match self.bounds == UNBOUNDED {
            true => {
                // One division instead of two.
                let (sl, sr) = (scorer.shrink(gl), scorer.shrink(gr));
                let (dl, dr) = (hl + scorer.lambda, hr + scorer.lambda);
                (sl * sl * dr + sr * sr * dl) / (dl * dr) - self.parent
            }
            false => {
                scorer.score(gl, hl, self.bounds) + scorer.score(gr, hr, self.bounds) - self.parent
            }
        };
        if gain > scorer.min_gain && self.best.is_none_or(|best| gain > best.0) {
            self.best = Some((gain, bin, default_left, left));
        }
    }

    /// Whether neither L1 regularization nor constraints apply.
    fn is_plain(&self) -> bool {
        self.scorer.alpha == 0.0 && self.monotone == 0 && self.bounds == UNBOUNDED
    }

    /// Like `numeric`, in the units of the integers and without a division for splits that are not better: the gain
    /// n/d - parent is above the best one if n > (best + parent) d.
    fn plain(&mut self, histogram: &[i64], missing: i64) {
        let scorer = self.scorer;
        let unit = scorer.unit_g * scorer.unit_g / scorer.unit_h;
        let lambda = scorer.lambda / scorer.unit_h;
        let least = (scorer.min_child_weight / scorer.unit_h).max(1.0);
        let (g, h) = (gradient_of(self.total) as f64, hessian_of(self.total) as f64);
        let (gm, hm) = (gradient_of(missing) as f64, hessian_of(missing) as f64);
        let mut best = (self.parent + scorer.min_gain) / unit;
        let mut found = None;
        let consider = |best: &mut f64, gl: f64, hl: f64| {
            let hr = h - hl;
            if hl < least || hr < least {
                return false;
            }
            let (gr, dl, dr) = (g - gl, hl + lambda, hr + lambda);
            let (n, d) = (gl * gl * dr + gr * gr * dl, dl * dr);
            let better = n > *best * d;
            if better {
                *best = n / d;
            }
            better
        };
        if missing != 0 && consider(&mut best, gm, hm) {
            found = Some((-1, true, missing));
        }
        let mut left = 0;
        let last = histogram.len().saturating_sub(1);
        for (bin, sum) in histogram[..last].iter().enumerate() {
            let bin = bin as i32;
            if *sum == 0 {
                if let Some((at, true, _)) = &mut found {
                    *at += i32::from(*at == bin - 1);
                }
                continue;
            }
            left += sum;
            let (gl, hl) = (gradient_of(left) as f64, hessian_of(left) as f64);
            if consider(&mut best, gl, hl) {
                found = Some((bin, false, left));
            }
            if missing != 0 && consider(&mut best, gl + gm, hl + hm) {
                found = Some((bin, true, left + missing));
            }
        }
        self.best = found
            .map(|(bin, default_left, left)| (best * unit - self.parent, bin, default_left, left));
    }

    /// Splits between bins. A split after an empty bin separates the same rows as the split before it. Of such splits,
    /// the chosen one sends the values of the empty bins, which no row of the node has, to the side of the missing
    /// values, as in XGBoost.
    fn numeric(&mut self, histogram: &[i64], missing: i64) {
        if missing != 0 {
            self.consider(missing, -1, true);
        }
        let mut left = 0;
        let last = histogram.len().saturating_sub(1);
        for (bin, sum) in histogram[..last].iter().enumerate() {
            let bin = bin as i32;
            if *sum == 0 {
                if let Some((_, at, true, _)) = &mut self.best {
                    *at += i32::from(*at == bin - 1);
                }
                continue;
            }
            left += sum;
            self.consider(left, bin, false);
            if missing != 0 {
                self.consider(left + missing, bin, true);
            }
        }
    }

    /// Categories in the order of their leaf values; the best split of them is one of this order (Fisher 1958).
    fn categorical(&mut self, histogram: &[i64], missing: i64) {
        let ratio = |code: &u32| {
            let (g, h) = self.scorer.sums(histogram[*code as usize]);
            g / (h + self.scorer.lambda).max(f64::MIN_POSITIVE)
        };
        let mut order: Vec<u32> =
            (0..histogram.len() as u32).filter(|code| histogram[*code as usize] != 0).collect();
        order.sort_by(|one, other| ratio(one).total_cmp(&ratio(other)).then(one.cmp(other)));
        let present: i64 = order.iter().map(|code| histogram[*code as usize]).sum();
        let mut right = 0;
        for (index, code) in order.iter().enumerate().take(order.len().saturating_sub(1)) {
            right += histogram[*code as usize];
            self.consider(present - right, index as i32, false);
            if missing != 0 {
                self.consider(present - right + missing, index as i32, true);
            }
        }
        self.order = order;
    }

    fn finish(self, feature: usize, cuts: &FeatureCuts) -> Option<Candidate> {
        let (gain, bin, default_left, left) = self.best?;
        let mut right_set = Vec::new();
        if cuts.categories > 0 {
            right_set = vec![0; cuts.categories.div_ceil(64)];
            for code in &self.order[..=bin as usize] {
                right_set[*code as usize / 64] |= 1 << (code % 64);
            }
        }
        Some(Candidate { gain, feature: feature as u32, bin, default_left, left, right_set })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that no row of the node has go where missing values go.
    #[test]
    fn gaps_follow_missing_values() {
        let packed = |g: i64, h: i64| (g << 32) + h;
        let (one, other) = (packed(5, 5), packed(-5, 5));
        let node = |histogram: [i64; 7], missing: i64, alpha: f64| {
            let params = Params { alpha, ..Params::default() };
            let scorer = Scorer::new(&params, &Scales { g: 1.0, h: 1.0, fine_g: 1.0, fine_h: 1.0 });
            let total = histogram.iter().sum::<i64>() + missing;
            let node = Node { histogram: &[], first_slot: 0, total, bounds: UNBOUNDED };
            let mut search = Search::new(&scorer, &node, 0);
            match search.is_plain() {
                true => search.plain(&histogram, missing),
                false => search.numeric(&histogram, missing),
            }
            search.best.map(|(_, bin, default_left, _)| (bin, default_left))
        };
        // Without and with the arithmetic of L1 regularization.
        for alpha in [0.0, 1e-9] {
            let apart = [0, one, 0, 0, other, 0, 0];
            assert_eq!(node(apart, 0, alpha), Some((1, false)));
            assert_eq!(node(apart, 3 * one, alpha), Some((3, true)));
            assert_eq!(node(apart, 3 * other, alpha), Some((1, false)));
            let together = [0, 0, one, 0, one, 0, 0];
            assert_eq!(node(together, 3 * other, alpha), Some((1, true)));
        }
    }

    #[test]
    fn candidates_survive_the_wire() {
        let numeric = Candidate {
            gain: 1.25,
            feature: 7,
            bin: -1,
            default_left: true,
            left: -5 << 32 | 9,
            right_set: vec![],
        };
        let categorical = Candidate { bin: 3, right_set: vec![5, u64::MAX], ..numeric.clone() };
        for candidate in [None, Some(numeric), Some(categorical)] {
            let mut words = vec![1; Candidate::words(2)];
            Candidate::encode(candidate.as_ref(), &mut words);
            assert_eq!(Candidate::decode(&words), candidate);
        }
    }
}
