//! A member's scratch, cut into the arrays that a kernel names.

use crate::cpu::Scratch;

/// Lends arrays of so many f32, each starting on a cache line of its own.
pub(super) fn with<const N: usize>(
    scratch: &Scratch,
    lens: [usize; N],
    work: impl FnOnce([*mut f32; N]),
) {
    const LINE: usize = 64 / size_of::<f32>();
    let lens = lens.map(|len| len.next_multiple_of(LINE));
    let total: usize = lens.iter().sum();
    scratch.with(total * size_of::<f32>(), |start| {
        let mut at = start.cast::<f32>();
        work(lens.map(|len| {
            let array = at;
            at = at.wrapping_add(len);
            array
        }))
    });
}
