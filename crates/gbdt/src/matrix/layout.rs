//! Where the bins of a feature are in a histogram, and which rank evaluates the feature. Pure.

use std::ops::Range;

use crate::matrix::cuts::Cuts;

/// Storage of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// One byte for each row.
    Bytes,
    /// Two bytes for each row.
    Words,
    /// Four bytes for each present value.
    Sparse,
}

/// Slots of a histogram. The features of a rank are consecutive, and all ranks have the same number of slots, so that a
/// reduce-scatter of a histogram gives each rank its features.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// First slot of each feature.
    pub starts: Vec<u32>,
    /// Slots of each feature: its bins, then one for missing values if the column is dense and has any.
    pub counts: Vec<u32>,
    pub storage: Vec<Storage>,
    /// Features of each rank.
    pub blocks: Vec<Range<usize>>,
    /// Slots of each rank.
    pub width: usize,
}

/// A column with fewer values is sparse: a fourth of the rows, at four bytes for each value.
const SPARSE_BELOW: f64 = 0.25;

impl Layout {
    pub fn new(cuts: &Cuts, rows: u64, ranks: usize) -> Layout {
        let storage: Vec<Storage> = cuts
            .features
            .iter()
            .map(|feature| match feature.bins() + usize::from(feature.missing) {
                _ if (feature.present as f64) < SPARSE_BELOW * rows as f64 => Storage::Sparse,
                0..=256 => Storage::Bytes,
                _ => Storage::Words,
            })
            .collect();
        let counts: Vec<u32> = cuts
            .features
            .iter()
            .zip(&storage)
            .map(|(feature, storage)| match storage {
                Storage::Sparse => feature.bins() as u32,
                _ => (feature.bins() + usize::from(feature.missing)) as u32,
            })
            .collect();
        let (blocks, width) = balance(&counts, ranks);
        let mut starts = vec![0; counts.len()];
        for (rank, block) in blocks.iter().enumerate() {
            let mut at = rank * width;
            for feature in block.clone() {
                starts[feature] = at as u32;
                at += counts[feature] as usize;
            }
        }
        Layout { starts, counts, storage, blocks, width }
    }

    /// Slots of a histogram.
    pub fn slots(&self) -> usize {
        self.width * self.blocks.len()
    }

    /// Slots of a feature.
    pub fn range(&self, feature: usize) -> Range<usize> {
        let start = self.starts[feature] as usize;
        start..start + self.counts[feature] as usize
    }
}

/// Splits the features into consecutive blocks, one per rank, so that the largest has as few slots as possible.
fn balance(counts: &[u32], ranks: usize) -> (Vec<Range<usize>>, usize) {
    let fill = |width: usize| {
        let (mut blocks, mut start, mut sum) = (Vec::new(), 0, 0);
        for (feature, count) in counts.iter().enumerate() {
            if sum + *count as usize > width {
                blocks.push(start..feature);
                (start, sum) = (feature, 0);
            }
            sum += *count as usize;
        }
        blocks.push(start..counts.len());
        blocks
    };
    let total: usize = counts.iter().map(|count| *count as usize).sum();
    let largest = counts.iter().copied().max().unwrap_or(0) as usize;
    let (mut low, mut high) = (largest.max(total.div_ceil(ranks)), total.max(largest));
    while low < high {
        let middle = low + (high - low) / 2;
        if fill(middle).len() <= ranks { high = middle } else { low = middle + 1 }
    }
    let mut blocks = fill(low);
    blocks.resize(ranks, counts.len()..counts.len());
    (blocks, low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_balanced_and_cover_all_features() {
        let counts: Vec<u32> = (0..29).map(|i| 1 + i * 37 % 256).collect();
        let total: u32 = counts.iter().sum();
        for ranks in 1..12 {
            let (blocks, width) = balance(&counts, ranks);
            assert_eq!(blocks.len(), ranks);
            let mut next = 0;
            for block in &blocks {
                assert_eq!(block.start, next);
                next = block.end;
                assert!(counts[block.clone()].iter().sum::<u32>() as usize <= width);
            }
            assert_eq!(next, counts.len());
            assert!(width <= total as usize / ranks + 256);
        }
        assert_eq!(balance(&[], 3), (vec![0..0, 0..0, 0..0], 0));
        assert_eq!(balance(&[0, 0], 2).1, 0);
    }
}
