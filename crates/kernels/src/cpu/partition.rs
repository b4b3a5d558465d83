//! Parallel loops over rows, in which each thread gets its rows of the outputs. The only place of the simple kernels
//! where one mutable slice is divided among threads.

use crate::Team;
use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice divided into parts of `width` elements, one for every `rows_per_part` rows.
pub(crate) struct OutputRows<'a, T> {
    start: *mut T,
    parts: usize,
    width: usize,
    rows_per_part: usize,
    lent: PhantomData<&'a mut [T]>,
}

/// Rows of `width` elements. With a width of zero, every thread gets an empty slice: an optional output.
pub(crate) fn by_rows<T>(slice: &mut [T], width: usize) -> OutputRows<'_, T> {
    by_blocks(slice, width, 1)
}

/// One part of `width` elements for each block of rows; ranges must then consist of whole blocks.
pub(crate) fn by_blocks<T>(
    slice: &mut [T],
    width: usize,
    rows_per_part: usize,
) -> OutputRows<'_, T> {
    let parts = slice.len().checked_div(width).unwrap_or(usize::MAX);
    OutputRows { start: slice.as_mut_ptr(), parts, width, rows_per_part, lent: PhantomData }
}

// SAFETY: threads access it only through `part`, which `parallel_for` calls with disjoint ranges. So each gets a
// `&mut [T]` of its own, which may be sent if T may.
unsafe impl<T: Send> Sync for OutputRows<'_, T> {}

/// One or several outputs that are divided by the same rows.
pub(crate) trait Outputs: Sync {
    type Part;

    /// # Safety
    /// Ranges of results that are alive at the same time must not overlap.
    unsafe fn part(&self, rows: Range<usize>) -> Self::Part;
}

impl<'a, T: Send> Outputs for OutputRows<'a, T> {
    type Part = &'a mut [T];

    unsafe fn part(&self, rows: Range<usize>) -> &'a mut [T] {
        let per = self.rows_per_part;
        let (from, to) = (rows.start / per, rows.end.div_ceil(per));
        assert!(
            to <= self.parts,
            "rows {rows:?} are out of range: the output has {} parts of {per} rows",
            self.parts
        );
        // A range that ends inside a block must be the last one: the next range would start inside the same block.
        assert!(
            rows.start.is_multiple_of(per) && (rows.end.is_multiple_of(per) || to == self.parts)
        );
        // SAFETY: within the slice by the assertion; the caller guarantees that no other part overlaps, and the
        // slice is borrowed for 'a.
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
        impl<$($name: Outputs),+> Outputs for ($($name,)+) {
            type Part = ($($name::Part,)+);

            unsafe fn part(&self, rows: Range<usize>) -> Self::Part {
                // SAFETY: the caller's promise.
                ($(unsafe { self.$at.part(rows.clone()) },)+)
            }
        }
    };
}
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);

/// Divides `0..rows` into one range per thread, of multiples of `grain`, and calls `work` with each range and its part
/// of the outputs.
pub(crate) fn parallel_for<C: Outputs>(
    team: &Team,
    rows: usize,
    grain: usize,
    outputs: C,
    work: impl Fn(Range<usize>, C::Part) + Sync,
) {
    team.split(rows, grain, &|range| {
        // SAFETY: the ranges of a team are disjoint, and the outputs are borrowed until all threads are done.
        let part = unsafe { outputs.part(range.clone()) };
        work(range, part);
    });
}

/// Minimum number of elements per thread: about a microsecond of simple work.
pub(crate) const GRAIN_SIZE: usize = 4096;

/// Minimum number of rows of `width` elements per thread.
pub(crate) fn grain_rows(width: usize) -> usize {
    GRAIN_SIZE.div_ceil(width.max(1))
}
