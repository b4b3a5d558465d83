//! How the members of a team share an output: a grid of rectangles. The summed direction is never cut.

use std::ops::Range;

/// Members as `rows × cols` of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub rows: usize,
    pub cols: usize,
}

/// Rows and columns of an output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rectangle {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl Rectangle {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() || self.cols.is_empty()
    }

    /// What it takes, in multiplications for each element of k.
    pub fn price(&self) -> usize {
        let (rows, cols) = (self.rows.len(), self.cols.len());
        rows * cols + PACKING * (rows + cols)
    }
}

/// Packing an element costs about as much as so many multiplications.
const PACKING: usize = 24;

impl Grid {
    /// The grid whose busiest member has the least to do. Members of one grid row pack the same rows of `a`,
    /// those of one grid column the same columns of `b`; a member's cut is a whole number of `grain`s.
    pub fn of(members: usize, m: usize, n: usize, grain: (usize, usize)) -> Grid {
        let busiest = |grid: &Grid| {
            let rows = m.div_ceil(grain.0).div_ceil(grid.rows) * grain.0;
            let cols = n.div_ceil(grain.1).div_ceil(grid.cols) * grain.1;
            Rectangle { rows: 0..rows, cols: 0..cols }.price()
        };
        (1..=members)
            .filter(|rows| members.is_multiple_of(*rows))
            .map(|rows| Grid { rows, cols: members / rows })
            .min_by_key(busiest)
            .expect("one row of members is always a grid")
    }

    /// The rectangle of a member: rows of the output go to rows of the grid in proportion to the paces of their
    /// members together, and the columns of each to its members in proportion to their own.
    pub fn share(
        self,
        member: usize,
        paces: &[f64],
        (m, n): (usize, usize),
        grain: (usize, usize),
    ) -> Rectangle {
        let (row, col) = (member / self.cols, member % self.cols);
        let top = |row: usize| edge(m, grain.0, paces, row * self.cols);
        let beside = &paces[row * self.cols..(row + 1) * self.cols];
        let left = |col: usize| edge(n, grain.1, beside, col);
        Rectangle { rows: top(row)..top(row + 1), cols: left(col)..left(col + 1) }
    }
}

/// Where the share of `index` begins in `0..len`, in whole grains: those before it have theirs by their paces.
fn edge(len: usize, grain: usize, paces: &[f64], index: usize) -> usize {
    let sum = |paces: &[f64]| paces.iter().sum::<f64>();
    let grains = len.div_ceil(grain) as f64 * sum(&paces[..index]) / sum(paces);
    (grains.round() as usize * grain).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_output_once() {
        for members in 1..9 {
            let equal = vec![1.0; members];
            let unequal: Vec<f64> =
                (0..members).map(|i| 1.0 / (1.0 + (i * 7 % 5) as f64)).collect();
            for (m, n) in [(1, 1), (5, 1000), (1000, 5), (64, 64), (33, 97)] {
                for paces in [&equal, &unequal] {
                    let grid = Grid::of(members, m, n, (4, 16));
                    assert_eq!(grid.rows * grid.cols, members);
                    let mut seen = vec![0; m * n];
                    for member in 0..members {
                        let share = grid.share(member, paces, (m, n), (4, 16));
                        for row in share.rows {
                            share.cols.clone().for_each(|col| seen[row * n + col] += 1);
                        }
                    }
                    assert!(seen.iter().all(|times| *times == 1), "{paces:?}, ({m}, {n})");
                }
            }
        }
    }

    #[test]
    fn cuts_the_long_side() {
        let grain = (1, 32);
        assert_eq!(Grid::of(2, 2048, 128, grain), Grid { rows: 2, cols: 1 });
        assert_eq!(Grid::of(2, 128, 50257, grain), Grid { rows: 1, cols: 2 });
        assert_eq!(Grid::of(4, 1024, 1024, grain), Grid { rows: 2, cols: 2 });
    }

    #[test]
    fn who_is_faster_gets_more() {
        let grid = Grid { rows: 2, cols: 2 };
        let share = |member| grid.share(member, &[3.0, 1.0, 2.0, 2.0], (800, 400), (1, 1));
        assert_eq!(share(0), Rectangle { rows: 0..400, cols: 0..300 });
        assert_eq!(share(1), Rectangle { rows: 0..400, cols: 300..400 });
        assert_eq!(share(2), Rectangle { rows: 400..800, cols: 0..200 });
    }
}
