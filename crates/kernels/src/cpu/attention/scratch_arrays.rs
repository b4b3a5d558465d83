//! Divides a scratch buffer into arrays.

use crate::cpu::Scratch;

/// Elements of a cache line.
const LINE: usize = 64 / size_of::<f32>();

/// Calls `work` with arrays of the given lengths, each starting on a new cache line.
pub(super) fn with<const N: usize>(
    scratch: &Scratch,
    lens: [usize; N],
    work: impl FnOnce([*mut f32; N]),
) {
    let total: usize = lens.iter().map(|len| len.next_multiple_of(LINE)).sum();
    scratch.with(total * size_of::<f32>(), |start| work(split(start.cast(), lens)));
}

/// Divides a buffer in the same way. Lengths are rounded up to whole cache lines.
pub(super) fn split<const N: usize>(start: *mut f32, lens: [usize; N]) -> [*mut f32; N] {
    let mut at = start;
    lens.map(|len| {
        let array = at;
        at = at.wrapping_add(len.next_multiple_of(LINE));
        array
    })
}
