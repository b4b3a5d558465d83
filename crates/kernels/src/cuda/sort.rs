//! A stable radix sort on the device, for sums over equal keys in a fixed order.

use super::elementwise::{THREADS, count};
use super::{Arg, Cuda, Grid, Source};

pub(crate) const SORT: Source = Source { name: "sort", code: include_str!("kernels/sort.cu") };

/// Pairs that a block sorts, as in the kernels.
const TILE: usize = 2048;

/// Memory of a sort of `n` keys.
pub(super) struct Sort {
    n: usize,
    start: u64,
}

/// Keys in ascending order, and the place of each in the original order, both u32.
pub(super) struct Sorted {
    pub keys: u64,
    pub order: u64,
}

impl Sort {
    /// Bytes of scratch memory.
    pub fn bytes(n: usize) -> usize {
        4 * array(n) + array(256 * n.div_ceil(TILE))
    }

    pub fn new(n: usize, start: u64) -> Sort {
        assert!(n < 1 << 31, "{n} keys exceed the range of the sort");
        Sort { n, start }
    }

    /// Address at which the caller writes the keys, u32.
    pub fn keys(&self) -> u64 {
        self.start
    }

    /// Sorts the keys, none of which exceeds `largest`. Equal keys keep their order.
    pub fn run(self, cuda: &Cuda, largest: usize) -> Sorted {
        let Sort { n, start } = self;
        let [mut keys, mut order, mut other_keys, mut other_order] =
            [0, 1, 2, 3].map(|i| start + i * array(n) as u64);
        let counts = start + 4 * array(n) as u64;
        let tiles = n.div_ceil(TILE);
        let bits = (usize::BITS - largest.leading_zeros()).max(1);
        for shift in (0..bits as i32).step_by(8) {
            let grid = Grid::new(tiles, THREADS);
            let args = [keys.into(), counts.into(), count(n), shift.into()];
            cuda.launch(&SORT, "sort_count", grid, &args);
            let args = [counts.into(), count(256 * tiles)];
            cuda.launch(&SORT, "sort_places", Grid::new(1, 1024), &args);
            // The order before the first pass is that of the keys.
            let values = Arg::from(if shift == 0 { 0 } else { order });
            let args = [
                keys.into(),
                values,
                counts.into(),
                other_keys.into(),
                other_order.into(),
                count(n),
                shift.into(),
            ];
            cuda.launch(&SORT, "sort_move", grid, &args);
            std::mem::swap(&mut keys, &mut other_keys);
            std::mem::swap(&mut order, &mut other_order);
        }
        Sorted { keys, order }
    }
}

/// Bytes of an array of u32 that ends at a multiple of 256 bytes.
fn array(n: usize) -> usize {
    (4 * n).next_multiple_of(256)
}
