//! Borrowed pieces of tensors: what operations take. A view is a (rows, cols) matrix of one element type,
//! row by row without gaps; whether its address is one of the host or of a device, it does not know.

use std::marker::PhantomData;
use std::ops::Range;

use crate::{Dtype, Element};

/// A borrowed matrix to read.
#[derive(Clone, Copy)]
pub struct View<'a> {
    start: *const u8,
    rows: usize,
    cols: usize,
    dtype: Dtype,
    life: PhantomData<&'a [u8]>,
}

/// A borrowed matrix to write.
pub struct ViewMut<'a> {
    start: *mut u8,
    rows: usize,
    cols: usize,
    dtype: Dtype,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a shared borrow of plain numbers.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}
// SAFETY: a mutable view is an exclusive borrow of plain numbers.
unsafe impl Send for ViewMut<'_> {}

impl<'a> View<'a> {
    /// # Safety
    /// `start` must point to that many initialised elements, unchanged for `'a`.
    pub(crate) unsafe fn new(start: *const u8, rows: usize, cols: usize, dtype: Dtype) -> View<'a> {
        View { start, rows, cols, dtype, life: PhantomData }
    }

    /// A slice of the host's as a view of one row.
    pub fn of<E: Element>(slice: &'a [E]) -> View<'a> {
        // SAFETY: the slice is what it says, for as long as it is borrowed.
        unsafe { View::new(slice.as_ptr().cast(), 1, slice.len(), E::DTYPE) }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// A run of elements, as one row.
    pub fn part(self, range: Range<usize>) -> View<'a> {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} of {} elements",
            self.len()
        );
        // SAFETY: inside what this view borrows.
        unsafe {
            View::new(self.start.add(range.start * self.dtype.bytes()), 1, range.len(), self.dtype)
        }
    }

    /// A run of rows.
    pub fn rows_of(self, range: Range<usize>) -> View<'a> {
        let (rows, cols) = (range.len(), self.cols);
        self.part(range.start * cols..range.end * cols).shaped(rows, cols)
    }

    /// The same elements in other rows.
    pub fn shaped(self, rows: usize, cols: usize) -> View<'a> {
        assert_eq!(
            self.len(),
            rows * cols,
            "{}×{} elements cannot be {rows}×{cols}",
            self.rows,
            self.cols
        );
        View { rows, cols, ..self }
    }

    /// The elements, for a view of memory that the host can read.
    ///
    /// # Panics
    /// When the view holds another type.
    pub fn host<E: Element>(self) -> &'a [E] {
        assert_eq!(self.dtype, E::DTYPE, "the view holds another type");
        // SAFETY: `start` holds `len` elements of this type for `'a`; every pattern is a value of it.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len()) }
    }
}

impl<'a> ViewMut<'a> {
    /// # Safety
    /// `start` must point to that many elements, which nobody else touches for `'a`.
    pub(crate) unsafe fn new(
        start: *mut u8,
        rows: usize,
        cols: usize,
        dtype: Dtype,
    ) -> ViewMut<'a> {
        ViewMut { start, rows, cols, dtype, life: PhantomData }
    }

    /// A slice of the host's as a view of one row.
    pub fn of<E: Element>(slice: &'a mut [E]) -> ViewMut<'a> {
        // SAFETY: the slice is what it says, and ours alone for as long as it is borrowed.
        unsafe { ViewMut::new(slice.as_mut_ptr().cast(), 1, slice.len(), E::DTYPE) }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The same for a shorter time, leaving this one for later.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { life: PhantomData, ..*self }
    }

    pub fn as_view(&self) -> View<'_> {
        // SAFETY: this view is borrowed for as long as the other lives.
        unsafe { View::new(self.start, self.rows, self.cols, self.dtype) }
    }

    /// A run of elements, as one row.
    pub fn part(self, range: Range<usize>) -> ViewMut<'a> {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} of {} elements",
            self.len()
        );
        // SAFETY: inside what this view borrows, which is given up for it.
        unsafe {
            ViewMut::new(
                self.start.add(range.start * self.dtype.bytes()),
                1,
                range.len(),
                self.dtype,
            )
        }
    }

    /// A run of rows.
    pub fn rows_of(self, range: Range<usize>) -> ViewMut<'a> {
        let (rows, cols) = (range.len(), self.cols);
        self.part(range.start * cols..range.end * cols).shaped(rows, cols)
    }

    /// The elements before `at` and those from there, each as one row.
    pub fn split_at(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        let (start, len, dtype) = (self.start, self.len(), self.dtype);
        assert!(at <= len, "{at} of {len} elements");
        // SAFETY: two halves of what this view borrows, which is given up for them.
        unsafe {
            let tail = start.add(at * dtype.bytes());
            (ViewMut::new(start, 1, at, dtype), ViewMut::new(tail, 1, len - at, dtype))
        }
    }

    /// The same elements in other rows.
    pub fn shaped(self, rows: usize, cols: usize) -> ViewMut<'a> {
        assert_eq!(
            self.len(),
            rows * cols,
            "{}×{} elements cannot be {rows}×{cols}",
            self.rows,
            self.cols
        );
        ViewMut { rows, cols, ..self }
    }

    /// The elements, for a view of memory that the host can write.
    ///
    /// # Panics
    /// When the view holds another type.
    pub fn host<E: Element>(self) -> &'a mut [E] {
        assert_eq!(self.dtype, E::DTYPE, "the view holds another type");
        // SAFETY: `start` holds `len` elements of this type, ours alone for `'a`.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len()) }
    }
}
