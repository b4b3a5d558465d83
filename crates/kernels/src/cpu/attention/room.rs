//! A member's scratch, cut into the arrays that a kernel names.

use crate::cpu::Scratch;

/// A cache line's worth.
const LINE: usize = 64 / size_of::<f32>();

/// Lends arrays of so many f32, each starting on a cache line of its own.
pub(super) fn with<const N: usize>(
    scratch: &Scratch,
    lens: [usize; N],
    work: impl FnOnce([*mut f32; N]),
) {
    let total: usize = lens.iter().map(|len| len.next_multiple_of(LINE)).sum();
    scratch.with(total * size_of::<f32>(), |start| work(cut(start.cast(), lens)));
}

/// The same of room that is there, where every length but the last is of whole cache lines.
pub(super) fn cut<const N: usize>(start: *mut f32, lens: [usize; N]) -> [*mut f32; N] {
    let mut at = start;
    lens.map(|len| {
        let array = at;
        at = at.wrapping_add(len.next_multiple_of(LINE));
        array
    })
}
