//! A few rows times a matrix, as when text is generated token by token: `b` is read once, as it lies, and
//! `a` waits in L1.

use super::epilogue::Tile;
use super::{Data, FEW_ROWS, Product};
use crate::Float;
use crate::cpu::{Cpu, Level};
use half::bf16;

/// Columns of the output that are worked on at a time.
const COLS: usize = 64;
const LANES: usize = 16;

pub fn run(cpu: &Cpu, product: &Product<'_>) {
    let (m, n, k) = (product.m, product.n, product.k);
    let chunks = n.div_ceil(COLS);
    cpu.team.run(&|member, size| {
        let (from, to) =
            (chunks * member / size * COLS, (chunks * (member + 1) / size * COLS).min(n));
        if from >= to {
            return;
        }
        // The rows of `a` in f32, each filled up to whole lanes, and the sums of a chunk.
        let row = k.next_multiple_of(LANES);
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
                multiply(cpu.level, product, a, row, col, cols, sums);
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
                _ if k >= product.k => 0.0,
                Data::F32(values) if a.rounded => bf16::narrow(values[a.index(i, k)]).wide(),
                Data::F32(values) => values[a.index(i, k)],
                Data::Bf16(values) => values[a.index(i, k)].wide(),
            };
        }
    }
}

/// `sums` (m, 64) of columns `col .. col + cols`.
fn multiply(
    level: Level,
    product: &Product<'_>,
    a: &[f32],
    row: usize,
    col: usize,
    cols: usize,
    sums: &mut [f32],
) {
    // SAFETY: the processor has the level that the team's `Cpu` was made with.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => on_avx512(product, a, row, col, cols, sums),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => on_avx2(product, a, row, col, cols, sums),
            _ => by_type::<false>(product, a, row, col, cols, sums),
        }
    }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn on_avx512(
    product: &Product<'_>,
    a: &[f32],
    row: usize,
    col: usize,
    cols: usize,
    sums: &mut [f32],
) {
    by_type::<true>(product, a, row, col, cols, sums);
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn on_avx2(
    product: &Product<'_>,
    a: &[f32],
    row: usize,
    col: usize,
    cols: usize,
    sums: &mut [f32],
) {
    by_type::<true>(product, a, row, col, cols, sums);
}

#[inline(always)]
fn by_type<const FMA: bool>(
    product: &Product<'_>,
    a: &[f32],
    row: usize,
    col: usize,
    cols: usize,
    sums: &mut [f32],
) {
    let b = &product.b;
    match b.data {
        Data::F32(values) if b.rounded => by_rows::<FMA, f32>(
            product,
            values,
            |x| bf16::narrow(x).wide(),
            a,
            row,
            col,
            cols,
            sums,
        ),
        Data::F32(values) => by_rows::<FMA, f32>(product, values, |x| x, a, row, col, cols, sums),
        Data::Bf16(values) => {
            by_rows::<FMA, bf16>(product, values, bf16::wide, a, row, col, cols, sums)
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)] // one call, taken apart by type and number of rows
fn by_rows<const FMA: bool, T: Copy>(
    product: &Product<'_>,
    b: &[T],
    wide: impl Fn(T) -> f32 + Copy,
    a: &[f32],
    row: usize,
    col: usize,
    cols: usize,
    sums: &mut [f32],
) {
    const { assert!(FEW_ROWS == 8) };
    // One, two, four or eight rows at a time.
    let mut first = 0;
    while first < product.m {
        let (a, sums) = (&a[first * row..], &mut sums[first * COLS..]);
        first += match product.m - first {
            8.. => few::<FMA, 8, T>(product, b, wide, a, row, col, cols, sums),
            4.. => few::<FMA, 4, T>(product, b, wide, a, row, col, cols, sums),
            2.. => few::<FMA, 2, T>(product, b, wide, a, row, col, cols, sums),
            _ => few::<FMA, 1, T>(product, b, wide, a, row, col, cols, sums),
        };
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn few<const FMA: bool, const ROWS: usize, T: Copy>(
    product: &Product<'_>,
    b: &[T],
    wide: impl Fn(T) -> f32 + Copy,
    a: &[f32],
    row: usize,
    col: usize,
    cols: usize,
    sums: &mut [f32],
) -> usize {
    let stride = product.b.stride;
    if product.b.k_runs {
        for j in 0..cols {
            let b = if product.k == 0 { &[] } else { &b[(col + j) * stride..][..product.k] };
            let dots = dot::<FMA, ROWS, T>(b, wide, a, row);
            (0..ROWS).for_each(|i| sums[i * COLS + j] = dots[i]);
        }
    } else {
        let mut j = 0;
        while j < cols {
            let width = (cols - j).min(LANES);
            let acc = columns::<FMA, ROWS, T>(b, stride, col + j, width, wide, a, row, product.k);
            (0..ROWS).for_each(|i| sums[i * COLS + j..][..width].copy_from_slice(&acc[i][..width]));
            j += LANES;
        }
    }
    ROWS
}

#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// A column of `b` that lies along k, with each row.
#[inline(always)]
fn dot<const FMA: bool, const ROWS: usize, T: Copy>(
    b: &[T],
    wide: impl Fn(T) -> f32 + Copy,
    a: &[f32],
    row: usize,
) -> [f32; ROWS] {
    let mut acc = [[0.0f32; LANES]; ROWS];
    let (whole, rest) = b.as_chunks::<LANES>();
    for (chunk, b) in whole.iter().enumerate() {
        let b = b.map(wide);
        for (i, acc) in acc.iter_mut().enumerate() {
            let a = &a[i * row + chunk * LANES..][..LANES];
            (0..LANES)
                .for_each(|lane| acc[lane] = multiply_add::<FMA>(a[lane], b[lane], acc[lane]));
        }
    }
    for (lane, b) in rest.iter().enumerate() {
        let (b, k) = (wide(*b), whole.len() * LANES + lane);
        (0..ROWS).for_each(|i| acc[i][lane] = multiply_add::<FMA>(a[i * row + k], b, acc[i][lane]));
    }
    acc.map(total)
}

/// Halves are added to halves: the same tree at every level.
#[inline(always)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    lanes[0]
}

/// Up to sixteen columns of a `b` that lies along n.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn columns<const FMA: bool, const ROWS: usize, T: Copy>(
    b: &[T],
    stride: usize,
    col: usize,
    width: usize,
    wide: impl Fn(T) -> f32 + Copy,
    a: &[f32],
    row: usize,
    k: usize,
) -> [[f32; LANES]; ROWS] {
    let mut acc = [[0.0f32; LANES]; ROWS];
    for p in 0..k {
        let line = &b[p * stride + col..][..width];
        if let Some(b) = line.first_chunk::<LANES>() {
            let b = b.map(wide);
            for (i, acc) in acc.iter_mut().enumerate() {
                let a = a[i * row + p];
                (0..LANES).for_each(|lane| acc[lane] = multiply_add::<FMA>(a, b[lane], acc[lane]));
            }
        } else {
            for (lane, b) in line.iter().enumerate() {
                let b = wide(*b);
                (0..ROWS).for_each(|i| {
                    acc[i][lane] = multiply_add::<FMA>(a[i * row + p], b, acc[i][lane])
                });
            }
        }
    }
    acc
}
