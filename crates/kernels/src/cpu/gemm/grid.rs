//! How the members of a team share an output: a grid of rectangles. The summed direction is never cut.

use std::ops::Range;

/// Members as `rows × cols` of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub rows: usize,
    pub cols: usize,
}

/// Packing an element costs about as much as so many multiplications.
const PACKING: usize = 24;

impl Grid {
    /// The grid whose busiest member has the least to do. Members of one grid row pack the same rows of `a`,
    /// those of one grid column the same columns of `b`; a member's cut is a whole number of `grain`s.
    pub fn of(members: usize, m: usize, n: usize, grain: (usize, usize)) -> Grid {
        let price = |grid: &Grid| {
            let rows = m.div_ceil(grain.0).div_ceil(grid.rows) * grain.0;
            let cols = n.div_ceil(grain.1).div_ceil(grid.cols) * grain.1;
            rows * cols + PACKING * (rows + cols)
        };
        (1..=members)
            .filter(|rows| members.is_multiple_of(*rows))
            .map(|rows| Grid { rows, cols: members / rows })
            .min_by_key(price)
            .expect("one row of members is always a grid")
    }

    /// The rectangle of a member: rows and columns of the output.
    pub fn share(
        self,
        member: usize,
        m: usize,
        n: usize,
        grain: (usize, usize),
    ) -> (Range<usize>, Range<usize>) {
        let (row, col) = (member / self.cols, member % self.cols);
        (cut(m, grain.0, row, self.rows), cut(n, grain.1, col, self.cols))
    }
}

/// Piece `index` of `pieces` of `0..len`, in whole grains.
fn cut(len: usize, grain: usize, index: usize, pieces: usize) -> Range<usize> {
    let grains = len.div_ceil(grain);
    let at = |index: usize| (grains * index / pieces * grain).min(len);
    at(index)..at(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_output_once() {
        for members in 1..9 {
            for (m, n) in [(1, 1), (5, 1000), (1000, 5), (64, 64), (33, 97)] {
                let grid = Grid::of(members, m, n, (4, 16));
                assert_eq!(grid.rows * grid.cols, members);
                let mut seen = vec![0; m * n];
                for member in 0..members {
                    let (rows, cols) = grid.share(member, m, n, (4, 16));
                    for row in rows {
                        cols.clone().for_each(|col| seen[row * n + col] += 1);
                    }
                }
                assert!(seen.iter().all(|times| *times == 1), "{members} members, ({m}, {n})");
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
}
