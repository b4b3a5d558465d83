//! The f32 inner loop in plain Rust: 4×8, which fills half the vector registers of a small processor.

use super::kernel::Rows;

const COLS: usize = 8;

/// # Safety
/// `a` is (k, rows) with at most 4 rows, `b` (k, 8) and `sums` (rows, 8).
pub unsafe fn multiply(rows: usize, k: usize, a: Rows, b: *const u8, sums: *mut f32, resume: bool) {
    let (a, b) = (a.start.cast(), b.cast());
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match rows {
            1 => tile::<1>(k, a, b, sums, resume),
            2 => tile::<2>(k, a, b, sums, resume),
            3 => tile::<3>(k, a, b, sums, resume),
            4 => tile::<4>(k, a, b, sums, resume),
            _ => unreachable!("panels have 1 to 4 rows"),
        }
    }
}

/// # Safety
/// As `multiply`.
unsafe fn tile<const ROWS: usize>(
    k: usize,
    a: *const f32,
    b: *const f32,
    sums: *mut f32,
    resume: bool,
) {
    // SAFETY: the panels have the shapes that `multiply` was promised.
    let (a, b, sums) = unsafe {
        let a = std::slice::from_raw_parts(a.cast::<[f32; ROWS]>(), k);
        let b = std::slice::from_raw_parts(b.cast::<[f32; COLS]>(), k);
        (a, b, std::slice::from_raw_parts_mut(sums.cast::<[f32; COLS]>(), ROWS))
    };
    let mut acc = [[0.0f32; COLS]; ROWS];
    if resume {
        acc.copy_from_slice(sums);
    }
    for (a, b) in a.iter().zip(b) {
        for row in 0..ROWS {
            for col in 0..COLS {
                acc[row][col] += a[row] * b[col];
            }
        }
    }
    sums.copy_from_slice(&acc);
}
