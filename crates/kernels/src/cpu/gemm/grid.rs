//! Partition of an output among threads: a grid of rectangles. k is never split.

use std::ops::Range;

/// Arrangement of the threads over the output.
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

    /// Cost in multiplications per element of k.
    pub fn cost(&self) -> usize {
        let (rows, cols) = (self.rows.len(), self.cols.len());
        rows * cols + PACKING_COST * (rows + cols)
    }
}

/// Cost of packing an element, in multiplications.
const PACKING_COST: usize = 24;

impl Grid {
    /// The grid with the lowest maximum cost per thread. Threads of one grid row pack the same rows of `a`, threads
    /// of one grid column the same columns of `b`. Rectangles are multiples of `granularity`.
    pub fn choose(threads: usize, m: usize, n: usize, granularity: (usize, usize)) -> Grid {
        let max_cost = |grid: &Grid| {
            let rows = m.div_ceil(granularity.0).div_ceil(grid.rows) * granularity.0;
            let cols = n.div_ceil(granularity.1).div_ceil(grid.cols) * granularity.1;
            Rectangle { rows: 0..rows, cols: 0..cols }.cost()
        };
        (1..=threads)
            .filter(|rows| threads.is_multiple_of(*rows))
            .map(|rows| Grid { rows, cols: threads / rows })
            .min_by_key(max_cost)
            .expect("a single row of threads is always a grid")
    }

    /// The rectangle of a thread. Rows of the output are divided among grid rows in proportion to the total speed of
    /// their threads, then columns among the threads of a grid row in proportion to their speeds.
    pub fn rectangle(
        self,
        thread: usize,
        speeds: &[f64],
        (m, n): (usize, usize),
        granularity: (usize, usize),
    ) -> Rectangle {
        let (row, col) = (thread / self.cols, thread % self.cols);
        let top = |row: usize| start(m, granularity.0, speeds, row * self.cols);
        let row_speeds = &speeds[row * self.cols..(row + 1) * self.cols];
        let left = |col: usize| start(n, granularity.1, row_speeds, col);
        Rectangle { rows: top(row)..top(row + 1), cols: left(col)..left(col + 1) }
    }
}

/// Start of part `index` of `0..len`, divided in proportion to `speeds` and rounded to `granularity`.
fn start(len: usize, granularity: usize, speeds: &[f64], index: usize) -> usize {
    let sum = |speeds: &[f64]| speeds.iter().sum::<f64>();
    let units = len.div_ceil(granularity) as f64 * sum(&speeds[..index]) / sum(speeds);
    (units.round() as usize * granularity).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rectangles_cover_the_output_once() {
        for threads in 1..9 {
            let equal = vec![1.0; threads];
            let unequal: Vec<f64> =
                (0..threads).map(|i| 1.0 / (1.0 + (i * 7 % 5) as f64)).collect();
            for (m, n) in [(1, 1), (5, 1000), (1000, 5), (64, 64), (33, 97)] {
                for speeds in [&equal, &unequal] {
                    let grid = Grid::choose(threads, m, n, (4, 16));
                    assert_eq!(grid.rows * grid.cols, threads);
                    let mut covered = vec![0; m * n];
                    for thread in 0..threads {
                        let Rectangle { rows, cols } =
                            grid.rectangle(thread, speeds, (m, n), (4, 16));
                        for row in rows {
                            cols.clone().for_each(|col| covered[row * n + col] += 1);
                        }
                    }
                    assert!(covered.iter().all(|times| *times == 1), "{speeds:?}, ({m}, {n})");
                }
            }
        }
    }

    #[test]
    fn the_longer_side_is_divided() {
        let granularity = (1, 32);
        assert_eq!(Grid::choose(2, 2048, 128, granularity), Grid { rows: 2, cols: 1 });
        assert_eq!(Grid::choose(2, 128, 50257, granularity), Grid { rows: 1, cols: 2 });
        assert_eq!(Grid::choose(4, 1024, 1024, granularity), Grid { rows: 2, cols: 2 });
    }

    #[test]
    fn faster_threads_get_more() {
        let grid = Grid { rows: 2, cols: 2 };
        let part = |thread| grid.rectangle(thread, &[3.0, 1.0, 2.0, 2.0], (800, 400), (1, 1));
        assert_eq!(part(0), Rectangle { rows: 0..400, cols: 0..300 });
        assert_eq!(part(1), Rectangle { rows: 0..400, cols: 300..400 });
        assert_eq!(part(2), Rectangle { rows: 400..800, cols: 0..200 });
    }
}
