//! Reductions over whole tensors and over rows. Every sum is divided into blocks that depend only on the shape and are
//! added in order, so the bits do not depend on the number of threads.

use super::Cpu;
use super::partition::{Outputs, by_blocks, by_rows, grain_rows, parallel_for};
use super::simd::{lane_sums, multiversion};
use crate::Float;
use std::ops::Range;

/// Elements that are summed in f32 before they are added to the f64 sum: 64 per lane.
const BLOCK: usize = 4096;

/// Σ x², accumulated in f64 beyond blocks of 4096.
pub fn sum_of_squares<E: Float>(cpu: &Cpu, x: &[E]) -> f64 {
    sum_blocks(cpu, x, squares)
}

/// Number of infinite or NaN elements.
pub fn count_non_finite<E: Float>(cpu: &Cpu, x: &[E]) -> u64 {
    sum_blocks(cpu, x, |level, x| non_finite(level, x) as f64) as u64
}

/// Bits of a checksum: as many as an f64 holds exactly, in which a GPU returns it.
pub const CHECKSUM_BITS: u32 = 52;

/// Sum over all elements of the product of their bits and a number that depends on their index. A change of one element
/// always changes it. The order of the sum does not matter, so that it is the same on every device.
pub fn checksum(bits: impl Iterator<Item = u32>) -> u64 {
    let term = |(index, bits): (usize, u32)| {
        let mix = (index as u32).wrapping_mul(0x9e37_79b1);
        u64::from(bits ^ mix) * u64::from(mix | 1)
    };
    let sum = bits.enumerate().map(term).fold(0u64, u64::wrapping_add);
    sum & ((1 << CHECKSUM_BITS) - 1)
}

/// Sums the rows of (rows, n) into `out` (n), e.g. the gradient of a bias. Adds to `out` or overwrites it.
pub fn column_sums<E: Float>(cpu: &Cpu, x: &[E], out: &mut [f32], accumulate: bool) {
    let n = out.len();
    if n == 0 {
        return;
    }
    assert!(x.len().is_multiple_of(n), "{} elements are not a multiple of n={n}", x.len());
    let sums = Sums { out: [out], accumulate };
    over_rows(cpu, x.len() / n, sums, by_rows(&mut [0u8; 0], 0), |rows, [sums], _| {
        add_rows(cpu.level, &x[rows.start * n..rows.end * n], sums);
    });
}

/// Calls `block_sum` on every block and adds the results in order.
fn sum_blocks<E: Float>(
    cpu: &Cpu,
    x: &[E],
    block_sum: impl Fn(super::Level, &[E]) -> f64 + Sync,
) -> f64 {
    cpu.scratch[0].with_default(x.len().div_ceil(BLOCK), |sums: &mut [f64]| {
        parallel_for(&cpu.team, x.len(), BLOCK * 4, by_blocks(sums, 1, BLOCK), |range, sums| {
            for (x, sum) in x[range].chunks(BLOCK).zip(sums) {
                *sum = block_sum(cpu.level, x);
            }
        });
        sums.iter().sum()
    })
}

/// `N` vectors of equal length that receive sums, or to which they are added.
pub(crate) struct Sums<'a, const N: usize> {
    pub out: [&'a mut [f32]; N],
    pub accumulate: bool,
}

/// Sums rows into `N` vectors of equal length. `work` gets a block of rows, the block's sums (initially zero) to add
/// them to, and the block's rows of other outputs. The sums of the blocks are then added in order.
pub(crate) fn over_rows<C: Outputs, const N: usize>(
    cpu: &Cpu,
    rows: usize,
    Sums { out, accumulate }: Sums<'_, N>,
    others: C,
    work: impl Fn(Range<usize>, [&mut [f32]; N], C::Part) + Sync,
) {
    // At most 32 blocks, so that adding them is cheap compared with computing them.
    let block = rows.div_ceil(32).max(16);
    let n = out[0].len();
    cpu.scratch[0].with_default(rows.div_ceil(block) * N * n, |sums: &mut [f32]| {
        // Each thread processes its rows block by block.
        let blocks = by_blocks(sums, N * n, block);
        let grain = grain_rows(N * n).next_multiple_of(block);
        cpu.team.split(rows, grain, &|range: Range<usize>| {
            for from in range.clone().step_by(block) {
                let rows = from..(from + block).min(range.end);
                // SAFETY: the ranges of threads are disjoint, and so are the blocks of one thread.
                let (sums, others) =
                    unsafe { (blocks.part(rows.clone()), others.part(rows.clone())) };
                let mut sums = sums.chunks_exact_mut(n.max(1));
                let sums = std::array::from_fn(|_| sums.next().unwrap_or_default());
                work(rows, sums, others);
            }
        });
        for (which, out) in out.into_iter().enumerate() {
            parallel_for(&cpu.team, n, grain_rows(8), by_rows(out, 1), |columns, out| {
                let first = which * n + columns.start;
                add_partials(cpu.level, sums, first, N * n, accumulate, out);
            });
        }
    });
}

multiversion! {
    fn squares<I, E: Float>(x: &[E]) -> f64 {
        lane_sums!(I, (x in x) sum = I::fma(x, x, sum)) as f64
    }

    fn non_finite<I, E: Float>(x: &[E]) -> u32 {
        let mut count = 0;
        for x in x {
            count += !x.as_f32().is_finite() as u32;
        }
        count
    }

    fn add_rows<I, E: Float>(x: &[E], sums: &mut [f32]) {
        let n = sums.len();
        // Four rows at a time: the sums are read and written once for all four.
        let mut fours = x.chunks_exact(4 * n);
        for four in &mut fours {
            let (a, b, c, d) = (&four[..n], &four[n..][..n], &four[2 * n..][..n], &four[3 * n..][..n]);
            for j in 0..n {
                sums[j] += (a[j].as_f32() + b[j].as_f32()) + (c[j].as_f32() + d[j].as_f32());
            }
        }
        for row in fours.remainder().chunks_exact(n) {
            let row = &row[..n];
            for j in 0..n {
                sums[j] += row[j].as_f32();
            }
        }
    }

    /// Sums column `first + j` of rows of `stride` elements into `out[j]`.
    fn add_partials<I>(sums: &[f32], first: usize, stride: usize, accumulate: bool, out: &mut [f32]) {
        if !accumulate {
            out.fill(0.0);
        }
        let n = out.len();
        for row in sums.chunks_exact(stride) {
            let row = &row[first..][..n];
            for j in 0..n {
                out[j] += row[j];
            }
        }
    }
}
