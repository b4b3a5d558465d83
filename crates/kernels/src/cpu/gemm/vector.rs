//! A few rows times a matrix, as when text is generated token by token: `b` is read once, as it lies, and
//! `a` waits in L1.

use super::epilogue::Tile;
use super::wide::Wide;
#[cfg(target_arch = "x86_64")]
use super::wide::Zmm;
use super::{Data, FEW_ROWS, Product};
use crate::Float;
use crate::cpu::{Cpu, Level};
use half::bf16;

/// Columns of the output that are worked on at a time.
const COLS: usize = 64;

pub fn run(cpu: &Cpu, product: &Product<'_>) {
    let (m, n, k) = (product.m, product.n, product.k);
    let chunks = n.div_ceil(COLS);
    cpu.team.run(&|member, size| {
        let (from, to) =
            (chunks * member / size * COLS, (chunks * (member + 1) / size * COLS).min(n));
        if from >= to {
            return;
        }
        // The rows of `a` in f32, and the sums of a chunk.
        let row = k;
        cpu.scratch[member].with(4 * (m * row + m * COLS), |scratch| {
            let a = scratch.cast::<f32>();
            // SAFETY: the scratch holds both, and is this thread's alone.
            let (a, sums) = unsafe {
                let sums = std::slice::from_raw_parts_mut(a.add(m * row), m * COLS);
                (std::slice::from_raw_parts_mut(a, m * row), sums)
            };
            gather(product, row, a);
            for col in (from..to).step_by(COLS) {
                let cols = (to - col).min(COLS);
                multiply(
                    cpu.level,
                    Columns { product, a, row, from: col, count: cols, sums: &mut *sums },
                );
                let tile =
                    Tile { sums: sums.as_mut_ptr(), stride: COLS, row: 0, col, rows: m, cols };
                // SAFETY: these columns are this member's alone, and lie in the output.
                unsafe { product.target.finish(cpu.level, tile) };
            }
        });
    });
}

/// Copies `a` as the product wants it: widened, and rounded where `b` is bf16.
fn gather(product: &Product<'_>, row: usize, to: &mut [f32]) {
    let a = &product.a;
    for (i, to) in to.chunks_exact_mut(row.max(1)).enumerate() {
        for (k, to) in to.iter_mut().enumerate() {
            *to = match a.data {
                Data::F32(values) if a.rounded => bf16::round_from(values[a.index(i, k)]).as_f32(),
                Data::F32(values) => values[a.index(i, k)],
                Data::Bf16(values) => values[a.index(i, k)].as_f32(),
            };
        }
    }
}

/// Columns `from .. from + count` of the product, into `sums` (m, 64).
struct Columns<'a> {
    product: &'a Product<'a>,
    a: &'a [f32],
    /// Elements from row to row of `a`.
    row: usize,
    from: usize,
    count: usize,
    sums: &'a mut [f32],
}

fn multiply(level: Level, columns: Columns<'_>) {
    // SAFETY: the processor has the level that the team's `Cpu` was made with.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => on_avx512(columns),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => on_avx2(columns),
            _ => by_type::<[f32; 8]>(columns),
        }
    }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn on_avx512(columns: Columns<'_>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { by_type::<Zmm<false>>(columns) }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn on_avx2(columns: Columns<'_>) {
    // SAFETY: the caller's promise, passed on.
    unsafe { by_type::<[f32; 8]>(columns) }
}

/// # Safety
/// The processor has `W`.
#[inline(always)]
unsafe fn by_type<W: Wide>(columns: Columns<'_>) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match columns.product.b.data {
            Data::F32(b) if columns.product.b.rounded => by_rows::<W, f32, true>(columns, b),
            Data::F32(b) => by_rows::<W, f32, false>(columns, b),
            Data::Bf16(b) => by_rows::<W, bf16, false>(columns, b),
        }
    }
}

/// One, two, four or eight rows at a time.
///
/// # Safety
/// The processor has `W`.
#[inline(always)]
unsafe fn by_rows<W: Wide, T: Float, const ROUND: bool>(mut columns: Columns<'_>, b: &[T]) {
    const { assert!(FEW_ROWS == 8) };
    let mut first = 0;
    while first < columns.product.m {
        // SAFETY: the caller's promise, passed on.
        first += unsafe {
            match columns.product.m - first {
                8.. => few::<W, T, 8, 2, ROUND>(&mut columns, first, b),
                4.. => few::<W, T, 4, 4, ROUND>(&mut columns, first, b),
                2.. => few::<W, T, 2, 4, ROUND>(&mut columns, first, b),
                _ => few::<W, T, 1, 4, ROUND>(&mut columns, first, b),
            }
        };
    }
}

/// `ROWS` rows from `first` on; `SIDE` registers of `b` at a time, from as many columns or of as many runs of
/// one line.
///
/// # Safety
/// The processor has `W`.
#[inline(always)]
unsafe fn few<W: Wide, T: Float, const ROWS: usize, const SIDE: usize, const ROUND: bool>(
    columns: &mut Columns<'_>,
    first: usize,
    b: &[T],
) -> usize {
    let side = if columns.product.b.k_runs { SIDE } else { SIDE * W::COUNT };
    for j in (0..columns.count).step_by(side) {
        let width = (columns.count - j).min(side);
        // SAFETY: the caller's promise, passed on; `width` columns are there.
        unsafe {
            match columns.product.b.k_runs {
                true => dots::<W, T, ROWS, SIDE, ROUND>(columns, first, j, width, b),
                false => lines::<W, T, ROWS, SIDE, ROUND>(columns, first, j, width, b),
            }
        }
    }
    ROWS
}

/// `width` columns that lie along k, with each row.
///
/// # Safety
/// The processor has `W`, and the columns are there.
#[inline(always)]
unsafe fn dots<W: Wide, T: Float, const ROWS: usize, const SIDE: usize, const ROUND: bool>(
    columns: &mut Columns<'_>,
    first: usize,
    j: usize,
    width: usize,
    b: &[T],
) {
    let (k, stride) = (columns.product.k, columns.product.b.stride);
    // SAFETY: reads stay within k of each column and row; a column that is not there is read as its neighbour,
    // and not written.
    unsafe {
        let a: [_; ROWS] =
            std::array::from_fn(|i| columns.a.as_ptr().add((first + i) * columns.row));
        let column = |c: usize| (columns.from + j + c.min(width - 1)) * stride;
        let b: [_; SIDE] = std::array::from_fn(|c| b.as_ptr().wrapping_add(column(c)));
        let mut acc = [[W::all(0.0); SIDE]; ROWS];
        for p in (0..k).step_by(W::COUNT) {
            let count = (k - p).min(W::COUNT);
            let b: [W; SIDE] = std::array::from_fn(|c| {
                let b = W::get(b[c].add(p), count);
                if ROUND { b.rounded() } else { b }
            });
            for i in 0..ROWS {
                let a = W::get(a[i].add(p), count);
                for c in 0..SIDE {
                    acc[i][c] = acc[i][c].add_product(a, b[c]);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (c, acc) in acc.iter().enumerate().take(width) {
                columns.sums[(first + i) * COLS + j + c] = acc.total();
            }
        }
    }
}

/// `width` columns that lie side by side.
///
/// # Safety
/// The processor has `W`, and the columns are there.
#[inline(always)]
unsafe fn lines<W: Wide, T: Float, const ROWS: usize, const SIDE: usize, const ROUND: bool>(
    columns: &mut Columns<'_>,
    first: usize,
    j: usize,
    width: usize,
    b: &[T],
) {
    let (k, stride) = (columns.product.k, columns.product.b.stride);
    let count = |c: usize| width.saturating_sub(c * W::COUNT).min(W::COUNT);
    // SAFETY: of each line only the columns that are there are read, and of the sums written.
    unsafe {
        let a: [_; ROWS] =
            std::array::from_fn(|i| columns.a.as_ptr().add((first + i) * columns.row));
        let b = b.as_ptr().wrapping_add(columns.from + j);
        let mut acc = [[W::all(0.0); SIDE]; ROWS];
        for p in 0..k {
            let b: [W; SIDE] = std::array::from_fn(|c| {
                let b = W::get(b.wrapping_add(p * stride + c * W::COUNT), count(c));
                if ROUND { b.rounded() } else { b }
            });
            for i in 0..ROWS {
                let a = W::all(*a[i].add(p));
                for c in 0..SIDE {
                    acc[i][c] = acc[i][c].add_product(a, b[c]);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            let sums = columns.sums[(first + i) * COLS + j..].as_mut_ptr();
            for (c, acc) in acc.iter().enumerate() {
                acc.put(sums.wrapping_add(c * W::COUNT), count(c));
            }
        }
    }
}
