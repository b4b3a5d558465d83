//! The f32 micro-kernel in plain Rust: 4×8, which fills half of a small processor's vector registers.

use super::panel::{Accumulator, KernelArgs};

const COLS: usize = 8;

/// # Safety
/// `a` is a packed panel (k, rows) with at most 4 rows, `b` is (k, 8) and the accumulator (rows, 8).
pub unsafe fn multiply(args: &KernelArgs) {
    let KernelArgs { k, acc, .. } = *args;
    let (a, b) = (args.a.start.cast(), args.b.cast());
    // SAFETY: the caller's promise.
    unsafe {
        match args.rows {
            1 => tile::<1>(k, a, b, acc),
            2 => tile::<2>(k, a, b, acc),
            3 => tile::<3>(k, a, b, acc),
            4 => tile::<4>(k, a, b, acc),
            _ => unreachable!("panels have 1 to 4 rows"),
        }
    }
}

/// # Safety
/// As `multiply`.
unsafe fn tile<const ROWS: usize>(k: usize, a: *const f32, b: *const f32, to: Accumulator) {
    // SAFETY: the panels have the shapes promised to `multiply`.
    let (a, b) = unsafe {
        let a = std::slice::from_raw_parts(a.cast::<[f32; ROWS]>(), k);
        (a, std::slice::from_raw_parts(b.cast::<[f32; COLS]>(), k))
    };
    // SAFETY: as promised for the accumulator.
    let row = |row: usize| unsafe { to.start.add(row * to.stride).cast::<[f32; COLS]>() };
    let mut acc = [[0.0f32; COLS]; ROWS];
    if to.accumulate {
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
