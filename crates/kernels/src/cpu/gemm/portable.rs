//! The f32 inner loop in plain Rust: 4×8, which fills half the vector registers of a small processor.

use super::kernel::{Ahead, Rows, Sums};

const COLS: usize = 8;

/// # Safety
/// `a` is (k, rows) with at most 4 rows, `b` (k, 8) and `sums` of (rows, 8).
pub unsafe fn multiply(rows: usize, k: usize, a: Rows, _: Ahead, b: *const u8, sums: Sums) {
    let (a, b) = (a.start.cast(), b.cast());
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match rows {
            1 => tile::<1>(k, a, b, sums),
            2 => tile::<2>(k, a, b, sums),
            3 => tile::<3>(k, a, b, sums),
            4 => tile::<4>(k, a, b, sums),
            _ => unreachable!("panels have 1 to 4 rows"),
        }
    }
}

/// # Safety
/// As `multiply`.
unsafe fn tile<const ROWS: usize>(k: usize, a: *const f32, b: *const f32, sums: Sums) {
    // SAFETY: the panels have the shapes that `multiply` was promised.
    let (a, b) = unsafe {
        let a = std::slice::from_raw_parts(a.cast::<[f32; ROWS]>(), k);
        (a, std::slice::from_raw_parts(b.cast::<[f32; COLS]>(), k))
    };
    // SAFETY: as the caller promised of the sums.
    let row = |row: usize| unsafe { sums.start.add(row * sums.stride).cast::<[f32; COLS]>() };
    let mut acc = [[0.0f32; COLS]; ROWS];
    if sums.resume {
        // SAFETY: as above.
        acc = std::array::from_fn(|i| unsafe { row(i).read() });
    }
    for (a, b) in a.iter().zip(b) {
        for row in 0..ROWS {
            for col in 0..COLS {
                acc[row][col] += a[row] * b[col];
            }
        }
    }
    for (i, acc) in acc.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { row(i).write(acc) };
    }
}
