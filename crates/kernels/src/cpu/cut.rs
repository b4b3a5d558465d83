//! Handing each member of a team its own rows of the outputs. The only place of the simple kernels where
//! one slice becomes several that are written at once.

use crate::Team;
use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice seen as parts of `width` elements, one for every `per` rows, to be dealt out.
pub(crate) struct Cut<'a, T> {
    start: *mut T,
    parts: usize,
    width: usize,
    per: usize,
    lent: PhantomData<&'a mut [T]>,
}

/// Rows of `width`. A width of zero gives everybody an empty slice: an output that is not wanted.
pub(crate) fn cut<T>(slice: &mut [T], width: usize) -> Cut<'_, T> {
    cut_blocks(slice, width, 1)
}

/// One part of `width` for each block of `per` rows; ranges must then be of whole blocks.
pub(crate) fn cut_blocks<T>(slice: &mut [T], width: usize, per: usize) -> Cut<'_, T> {
    let parts = slice.len().checked_div(width).unwrap_or(usize::MAX);
    Cut { start: slice.as_mut_ptr(), parts, width, per, lent: PhantomData }
}

// SAFETY: members reach it through `parts` only, which `split` calls with disjoint ranges; so it hands a
// `&mut [T]` to each, and that may be sent when T may.
unsafe impl<T: Send> Sync for Cut<'_, T> {}

/// One cut or a few, dealt out by the same rows.
pub(crate) trait Cuts: Sync {
    type Parts;

    /// # Safety
    /// No two calls' results that live at the same time may come from ranges that overlap.
    unsafe fn parts(&self, rows: Range<usize>) -> Self::Parts;
}

impl<'a, T: Send> Cuts for Cut<'a, T> {
    type Parts = &'a mut [T];

    unsafe fn parts(&self, rows: Range<usize>) -> &'a mut [T] {
        let (from, to) = (rows.start / self.per, rows.end.div_ceil(self.per));
        assert!(
            to <= self.parts,
            "rows {rows:?} of an output of {} parts of {} rows",
            self.parts,
            self.per
        );
        // A range that ends inside a block must be the last one: its neighbour would begin in that block.
        assert!(
            rows.start.is_multiple_of(self.per)
                && (rows.end.is_multiple_of(self.per) || to == self.parts)
        );
        // SAFETY: inside the slice by the assertion; nobody else has these rows by the caller's promise, and
        // the slice itself is lent to us for 'a.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.start.add(from * self.width),
                (to - from) * self.width,
            )
        }
    }
}

macro_rules! tuples {
    ($($name:ident $at:tt),+) => {
        impl<$($name: Cuts),+> Cuts for ($($name,)+) {
            type Parts = ($($name::Parts,)+);

            unsafe fn parts(&self, rows: Range<usize>) -> Self::Parts {
                // SAFETY: the caller's promise is passed on.
                ($(unsafe { self.$at.parts(rows.clone()) },)+)
            }
        }
    };
}
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);

/// Cuts `0..rows` into runs of whole `grain`s, one per member, and calls `work` with each and with the
/// outputs' parts of it.
pub(crate) fn split<C: Cuts>(
    team: &Team,
    rows: usize,
    grain: usize,
    outputs: C,
    work: impl Fn(Range<usize>, C::Parts) + Sync,
) {
    team.split(rows, grain, &|range| {
        // SAFETY: a team's ranges are disjoint, and the outputs are ours until all members are done.
        let parts = unsafe { outputs.parts(range.clone()) };
        work(range, parts);
    });
}

/// Elements that are worth a member's waking: about a microsecond of simple work.
pub(crate) const WORTH: usize = 4096;

/// How many rows of `width` are worth a member's waking.
pub(crate) fn worth(width: usize) -> usize {
    WORTH.div_ceil(width.max(1))
}
