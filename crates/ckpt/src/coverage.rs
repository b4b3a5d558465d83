//! Checks that the pieces of a tensor contain each of its elements exactly once. The time depends on the number of
//! pieces, not on the number of elements, which a forged manifest may make huge.

use crate::manifest::PieceAt;
use lockstep_plan::model::Runs;
use std::collections::BTreeMap;
use std::ops::Range;

/// Elements of a tensor with `row` elements per row.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub elements: usize,
    pub row: usize,
}

impl Extent {
    /// The extent of a tensor, or `None` if its size overflows or is zero.
    pub fn of(dims: &[usize]) -> Option<Extent> {
        let product =
            |dims: &[usize]| dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
        let (elements, row) = (product(dims)?, product(dims.get(1..)?)?);
        (elements > 0).then_some(Extent { elements, row })
    }

    /// Number of elements of a piece whose runs are inside the tensor, in its order and without overlap. Several runs
    /// are columns of consecutive rows.
    pub fn elements_of(&self, runs: &[Runs]) -> Option<usize> {
        let (mut end, mut elements) = (0, 0usize);
        for runs in runs {
            let Runs { start, len, stride, count } = *runs;
            let row_end = (start % self.row).checked_add(len)?;
            let columns = count == 1 || (stride == self.row && row_end <= self.row);
            if start < end || len == 0 || count == 0 || !columns {
                return None;
            }
            let last = (count - 1).checked_mul(stride)?.checked_add(start)?;
            end = last.checked_add(len).filter(|end| *end <= self.elements)?;
            elements += len * count;
        }
        Some(elements)
    }

    /// Whether no element is in two of the pieces, which have passed `elements_of`.
    pub fn disjoint(&self, pieces: &[PieceAt]) -> bool {
        let runs = pieces.iter().flat_map(|piece| &piece.runs);
        let blocks: Vec<Block> = runs.flat_map(|runs| self.blocks(*runs)).collect();
        // Sweep over the rows with the columns of the blocks that contain the current row. At the same row, blocks
        // end before others start.
        let starts = blocks.iter().map(|block| (block.rows.start, true, &block.columns));
        let ends = blocks.iter().map(|block| (block.rows.end, false, &block.columns));
        let mut events: Vec<_> = starts.chain(ends).collect();
        events.sort_unstable_by_key(|(row, starts, columns)| (*row, *starts, columns.start));
        let mut active = BTreeMap::new();
        for (_, starts, columns) in events {
            if !starts {
                active.remove(&columns.start);
                continue;
            }
            let before = active.range(..columns.end).next_back();
            if before.is_some_and(|(_, end)| *end > columns.start) {
                return false;
            }
            active.insert(columns.start, columns.end);
        }
        true
    }

    /// The runs as rectangles: columns of several rows, or a part of a row, whole rows and a part of a row.
    fn blocks(&self, runs: Runs) -> Vec<Block> {
        let (row, start, end) = (runs.start / self.row, runs.start, runs.start + runs.len);
        if runs.count > 1 || end <= (row + 1) * self.row {
            let column = start - row * self.row;
            let columns = column..column + runs.len;
            return vec![Block { rows: row..row + runs.count, columns }];
        }
        let (first, last) = (start.div_ceil(self.row), end / self.row);
        let all = [
            Block { rows: row..row + 1, columns: start - row * self.row..self.row },
            Block { rows: first..last, columns: 0..self.row },
            Block { rows: last..last + 1, columns: 0..end - last * self.row },
        ];
        let skip_first = usize::from(first == row);
        let real = |block: &Block| !block.rows.is_empty() && !block.columns.is_empty();
        all.into_iter().skip(skip_first).filter(real).collect()
    }
}

struct Block {
    rows: Range<usize>,
    columns: Range<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(runs: Vec<Runs>) -> PieceAt {
        PieceAt { file: 0, at: 0, runs, counts: true }
    }

    /// Counts how often each element is contained.
    fn counts(extent: Extent, pieces: &[PieceAt]) -> Vec<usize> {
        let mut counts = vec![0; extent.elements];
        let runs = pieces.iter().flat_map(|piece| &piece.runs);
        runs.flat_map(|runs| runs.ranges()).flatten().for_each(|element| counts[element] += 1);
        counts
    }

    proptest! {
        #[test]
        fn agrees_with_counting_every_element(
            rows in 1usize..6,
            row in 1usize..6,
            drawn in prop::collection::vec((0usize..40, 1usize..12, 1usize..5, any::<bool>()), 1..6),
        ) {
            let extent = Extent::of(&[rows, row]).unwrap();
            let pieces: Vec<PieceAt> = drawn.into_iter().map(|(start, len, count, one)| {
                let count = if one { 1 } else { count };
                piece(vec![Runs { start, len, stride: if count == 1 { 0 } else { row }, count }])
            }).filter(|piece| extent.elements_of(&piece.runs).is_some()).collect();
            let once = counts(extent, &pieces).iter().all(|count| *count < 2);
            prop_assert_eq!(extent.disjoint(&pieces), once);
        }
    }

    #[test]
    fn runs_outside_the_tensor_or_out_of_order_are_rejected() {
        let extent = Extent::of(&[4, 6]).unwrap();
        let run = |start, len, stride, count| Runs { start, len, stride, count };
        assert_eq!(extent.elements_of(&[run(2, 2, 6, 4)]), Some(8));
        assert_eq!(
            extent.elements_of(&[run(4, 2, 0, 1), run(6, 6, 6, 2), run(18, 1, 0, 1)]),
            Some(15)
        );
        for runs in [
            vec![run(20, 5, 0, 1)],
            vec![run(2, 2, 6, 5)],
            vec![run(2, 2, 5, 2)],
            vec![run(5, 2, 6, 2)],
            vec![run(0, 0, 0, 1)],
            vec![run(0, 1, 6, 0)],
            vec![run(6, 6, 0, 1), run(0, 6, 0, 1)],
            vec![run(0, 6, 0, 1), run(5, 1, 0, 1)],
            vec![run(usize::MAX, 1, 0, 1)],
            vec![run(0, usize::MAX, 0, 1)],
            vec![run(0, 1, 6, usize::MAX)],
        ] {
            assert_eq!(extent.elements_of(&runs), None, "{runs:?}");
        }
        assert!(Extent::of(&[usize::MAX, 2]).is_none() && Extent::of(&[]).is_none());
    }
}
