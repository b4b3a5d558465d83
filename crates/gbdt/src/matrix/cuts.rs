//! Thresholds of features. The rule for their choice, and why it does not depend on the number of ranks, is in
//! `sketch.rs`.

use serde::{Deserialize, Serialize};

use crate::matrix::select::key_of;

/// Thresholds of all features.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cuts {
    pub features: Vec<FeatureCuts>,
}

/// Thresholds of one feature: value x is in bin b if b thresholds are at most x.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FeatureCuts {
    pub thresholds: Vec<f32>,
    /// Smallest value; 0 if there is none.
    pub min: f32,
    /// Number of rows of all ranks that have a value.
    pub present: u64,
    /// Whether a row of any rank has no value.
    pub missing: bool,
    /// Number of categories; 0 for a numeric feature. Category c is bin c.
    pub categories: usize,
}

impl FeatureCuts {
    /// Number of bins, without the one of missing values.
    pub fn bins(&self) -> usize {
        match (self.present, self.categories) {
            (0, _) => 0,
            (_, 0) => self.thresholds.len() + 1,
            (_, categories) => categories,
        }
    }

    /// Finds the bins of many values.
    pub fn finder(&self) -> Finder {
        let size = (self.thresholds.len() + 1).next_power_of_two();
        let keys = self.thresholds.iter().map(|threshold| key_of(*threshold));
        let table = keys.chain(std::iter::repeat(u32::MAX)).take(size).collect();
        Finder { table, categorical: self.categories > 0 }
    }

    /// The threshold of a split after `bin`: values of the bins up to it are smaller. A split before all bins (-1)
    /// separates missing values from the others.
    pub fn threshold(&self, bin: i32) -> f32 {
        usize::try_from(bin).map_or(self.min, |bin| self.thresholds[bin])
    }

    /// The last bin whose values are smaller than `threshold`, which is one of ours; -1 if there is none.
    pub fn split_bin(&self, threshold: f32) -> i32 {
        self.thresholds.partition_point(|other| *other <= threshold) as i32 - 1
    }
}

/// A search over the keys of the thresholds of a feature, padded to a power of two.
pub struct Finder {
    table: Vec<u32>,
    categorical: bool,
}

impl Finder {
    /// The bin of a finite value; the value itself for a category.
    #[inline(always)]
    pub fn bin(&self, value: f32) -> usize {
        if self.categorical {
            return value as usize;
        }
        // In integers and without branches: a branch would be mispredicted every other time.
        let above = u64::from(key_of(value)) + 1;
        let (mut bin, mut bit) = (0, self.table.len().trailing_zeros());
        while bit > 0 {
            bit -= 1;
            // SAFETY: bin is at most the length less 2 << bit.
            let key = unsafe { *self.table.get_unchecked(bin + (1 << bit) - 1) };
            // The sign of the difference: 1 if the threshold is at most the value.
            bin += ((u64::from(key).wrapping_sub(above) >> 63) as usize) << bit;
        }
        bin
    }
}

#[cfg(test)]
mod tests {
    use super::FeatureCuts;

    #[test]
    fn bins_count_thresholds() {
        for count in 0..20 {
            let thresholds: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let cuts = FeatureCuts { thresholds, min: -5.0, present: 1, ..FeatureCuts::default() };
            for value in [-5.0, -0.5, 0.0, 0.5, 3.0, 7.9, 8.0, 100.0] {
                let expected = cuts.thresholds.iter().filter(|t| **t <= value).count();
                assert_eq!(cuts.finder().bin(value), expected, "{count} {value}");
            }
            for bin in -1..count {
                assert_eq!(cuts.split_bin(cuts.threshold(bin)), bin);
            }
        }
    }
}
