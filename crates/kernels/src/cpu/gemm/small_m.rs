//! Products with at most `SMALL_GEMM_ROWS` rows, as in token-by-token generation: `b` is read once without packing, and `a`
//! stays in L1.

use super::epilogue::Tile;
use super::masked_vector::MaskedVector;
#[cfg(target_arch = "x86_64")]
use super::masked_vector::Zmm;
use super::{Data, Product};
use crate::Float;
use crate::cpu::{Cpu, Level};
use half::bf16;
use lockstep_types::SMALL_GEMM_ROWS;

/// Columns of the output that are computed at a time.
const COLS: usize = 64;

pub fn run(cpu: &Cpu, product: &Product<'_>) {
    let (m, n, k) = (product.m, product.n, product.k);
    let chunks = n.div_ceil(COLS);
    cpu.team.run(&|thread, threads| {
        let (from, to) =
            (chunks * thread / threads * COLS, (chunks * (thread + 1) / threads * COLS).min(n));
        if from >= to {
            return;
        }
        // The rows of `a` in f32, and the sums of a chunk.
        cpu.scratch[thread].with(4 * (m * k + m * COLS), |scratch| {
            let a = scratch.cast::<f32>();
            // SAFETY: the scratch holds both and belongs to this thread.
            let (a, sums) = unsafe {
                let sums = std::slice::from_raw_parts_mut(a.add(m * k), m * COLS);
                (std::slice::from_raw_parts_mut(a, m * k), sums)
            };
            copy_a(product, a);
            for col in (from..to).step_by(COLS) {
                let cols = (to - col).min(COLS);
                multiply(
                    cpu.level,
                    Columns { product, a, first: col, count: cols, sums: &mut *sums },
                );
                let tile =
                    Tile { sums: sums.as_mut_ptr(), stride: COLS, row: 0, col, rows: m, cols };
                // SAFETY: the columns are within the output, and no other thread writes to them.
                unsafe { product.output.finish(cpu.level, tile) };
            }
        });
    });
}

/// Copies `a` as f32, rounded to bf16 if the product is.
fn copy_a(product: &Product<'_>, to: &mut [f32]) {
    let a = &product.a;
    for (i, to) in to.chunks_exact_mut(product.k.max(1)).enumerate() {
        for (k, to) in to.iter_mut().enumerate() {
            *to = match a.data {
                Data::F32(values) if a.round_to_bf16 => {
                    bf16::round_from(values[a.index(i, k)]).as_f32()
                }
                Data::F32(values) => values[a.index(i, k)],
                Data::Bf16(values) => values[a.index(i, k)].as_f32(),
            };
        }
    }
}

/// Columns `first .. first + count` of the product.
struct Columns<'a> {
    product: &'a Product<'a>,
    a: &'a [f32], // (m, k)
    first: usize,
    count: usize,
    sums: &'a mut [f32], // (m, 64)
}

fn multiply(level: Level, columns: Columns<'_>) {
    // SAFETY: the processor supports the level of its `Cpu`.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => by_type_avx512(columns),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => by_type_avx2(columns),
            _ => by_type::<[f32; 8]>(columns),
        }
    }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn by_type_avx512(columns: Columns<'_>) {
    // SAFETY: the caller's promise.
    unsafe { by_type::<Zmm<false>>(columns) }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn by_type_avx2(columns: Columns<'_>) {
    // SAFETY: the caller's promise.
    unsafe { by_type::<[f32; 8]>(columns) }
}

/// # Safety
/// The processor supports `V`.
#[inline(always)]
unsafe fn by_type<V: MaskedVector>(columns: Columns<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match columns.product.b.data {
            Data::F32(b) if columns.product.b.round_to_bf16 => by_rows::<V, f32, true>(columns, b),
            Data::F32(b) => by_rows::<V, f32, false>(columns, b),
            Data::Bf16(b) => by_rows::<V, bf16, false>(columns, b),
        }
    }
}

/// Computes one, two, four or eight rows at a time.
///
/// # Safety
/// The processor supports `V`.
#[inline(always)]
unsafe fn by_rows<V: MaskedVector, T: Float, const ROUND: bool>(mut columns: Columns<'_>, b: &[T]) {
    const { assert!(SMALL_GEMM_ROWS == 8) };
    let mut row = 0;
    while row < columns.product.m {
        // SAFETY: the caller's promise.
        row += unsafe {
            match columns.product.m - row {
                8.. => rows::<V, T, 8, 2, ROUND>(&mut columns, row, b),
                4.. => rows::<V, T, 4, 4, ROUND>(&mut columns, row, b),
                2.. => rows::<V, T, 2, 4, ROUND>(&mut columns, row, b),
                _ => rows::<V, T, 1, 4, ROUND>(&mut columns, row, b),
            }
        };
    }
}

/// Computes `ROWS` rows from `row` on, with `REGS` registers of `b` at a time: one per column, or adjacent ones of a
/// matrix row.
///
/// # Safety
/// The processor supports `V`.
#[inline(always)]
unsafe fn rows<
    V: MaskedVector,
    T: Float,
    const ROWS: usize,
    const REGS: usize,
    const ROUND: bool,
>(
    columns: &mut Columns<'_>,
    row: usize,
    b: &[T],
) -> usize {
    let step = if columns.product.b.k_contiguous { REGS } else { REGS * V::LANES };
    for j in (0..columns.count).step_by(step) {
        let width = (columns.count - j).min(step);
        // SAFETY: the caller's promise; `width` columns exist.
        unsafe {
            match columns.product.b.k_contiguous {
                true => dot_columns::<V, T, ROWS, REGS, ROUND>(columns, row, j, width, b),
                false => axpy_rows::<V, T, ROWS, REGS, ROUND>(columns, row, j, width, b),
            }
        }
    }
    ROWS
}

/// Dot products of each row with `width` columns that are contiguous along k.
///
/// # Safety
/// The processor supports `V`, and the columns exist.
#[inline(always)]
unsafe fn dot_columns<
    V: MaskedVector,
    T: Float,
    const ROWS: usize,
    const REGS: usize,
    const ROUND: bool,
>(
    columns: &mut Columns<'_>,
    row: usize,
    j: usize,
    width: usize,
    b: &[T],
) {
    let (k, stride) = (columns.product.k, columns.product.b.stride);
    // SAFETY: reads stay within k of each column and row. A column past `width` reads its neighbour and is not
    // written.
    unsafe {
        let a: [_; ROWS] = std::array::from_fn(|i| columns.a.as_ptr().add((row + i) * k));
        let column = |c: usize| (columns.first + j + c.min(width - 1)) * stride;
        let b: [_; REGS] = std::array::from_fn(|c| b.as_ptr().wrapping_add(column(c)));
        let mut acc = [[V::splat(0.0); REGS]; ROWS];
        for p in (0..k).step_by(V::LANES) {
            let count = (k - p).min(V::LANES);
            let b: [V; REGS] = std::array::from_fn(|c| {
                let b = V::load(b[c].add(p), count);
                if ROUND { b.round_to_bf16() } else { b }
            });
            for i in 0..ROWS {
                let a = V::load(a[i].add(p), count);
                for c in 0..REGS {
                    acc[i][c] = acc[i][c].add_product(a, b[c]);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (c, acc) in acc.iter().enumerate().take(width) {
                columns.sums[(row + i) * COLS + j + c] = acc.sum();
            }
        }
    }
}

/// Sums of matrix rows of `b`, each times an element of `a`, over `width` adjacent columns.
///
/// # Safety
/// The processor supports `V`, and the columns exist.
#[inline(always)]
unsafe fn axpy_rows<
    V: MaskedVector,
    T: Float,
    const ROWS: usize,
    const REGS: usize,
    const ROUND: bool,
>(
    columns: &mut Columns<'_>,
    row: usize,
    j: usize,
    width: usize,
    b: &[T],
) {
    let (k, stride) = (columns.product.k, columns.product.b.stride);
    let count = |c: usize| width.saturating_sub(c * V::LANES).min(V::LANES);
    // SAFETY: only existing columns are read from `b` and written to the sums.
    unsafe {
        let a: [_; ROWS] = std::array::from_fn(|i| columns.a.as_ptr().add((row + i) * k));
        let b = b.as_ptr().wrapping_add(columns.first + j);
        let mut acc = [[V::splat(0.0); REGS]; ROWS];
        for p in 0..k {
            let b: [V; REGS] = std::array::from_fn(|c| {
                let b = V::load(b.wrapping_add(p * stride + c * V::LANES), count(c));
                if ROUND { b.round_to_bf16() } else { b }
            });
            for i in 0..ROWS {
                let a = V::splat(*a[i].add(p));
                for c in 0..REGS {
                    acc[i][c] = acc[i][c].add_product(a, b[c]);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            let sums = columns.sums[(row + i) * COLS + j..].as_mut_ptr();
            for (c, acc) in acc.iter().enumerate() {
                acc.store(sums.wrapping_add(c * V::LANES), count(c));
            }
        }
    }
}
