//! Borrowed parts of tensors, which operations take. A view is a contiguous, row-major (rows, cols) matrix that
//! knows its element type and which memory it is in.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use super::Location;
use crate::{Dtype, Element};

/// A borrowed matrix, read-only.
#[derive(Clone, Copy)]
pub struct View<'a> {
    start: *const u8,
    extent: Extent,
    lifetime: PhantomData<&'a [u8]>,
}

/// A borrowed matrix, writable.
pub struct ViewMut<'a> {
    start: *mut u8,
    extent: Extent,
    lifetime: PhantomData<&'a mut [u8]>,
}

/// Shape, element type and memory of a tensor or view.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
    pub location: Location,
}

impl Extent {
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn shaped(self, rows: usize, cols: usize) -> Extent {
        assert_eq!(self.len(), rows * cols, "{self} cannot be reshaped to [{rows}×{cols}]");
        Extent { rows, cols, ..self }
    }

    /// One row of `len` elements.
    fn row(self, len: usize) -> Extent {
        Extent { rows: 1, cols: len, ..self }
    }

    /// A range of elements as one row, and the byte offset where it starts.
    fn part(self, range: &Range<usize>) -> (usize, Extent) {
        let Range { start, end } = *range;
        assert!(start <= end && end <= self.len(), "elements {start}..{end} of {self}");
        (start * self.dtype.bytes(), self.row(end - start))
    }

    fn device_address(&self, start: *const u8) -> u64 {
        // An empty view may stand for an absent operand; its address is never used.
        assert!(
            self.location != Location::Host || self.len() == 0,
            "{self} is in pageable host memory, which the GPU cannot address; use Device::write"
        );
        start as u64
    }

    fn check_host<E: Element>(&self) {
        assert_eq!(self.dtype, E::DTYPE, "{self} accessed as {}", E::DTYPE);
        assert!(
            self.location.is_host_accessible(),
            "{self} is in {} memory, which the host cannot address; use Device::read or Device::write",
            self.location
        );
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}×{}]", self.dtype, self.rows, self.cols)
    }
}

// SAFETY: a view is a shared borrow of plain numbers.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}
// SAFETY: a mutable view is an exclusive borrow of plain numbers.
unsafe impl Send for ViewMut<'_> {}

impl<'a> View<'a> {
    /// # Safety
    /// `start` must point to `extent.len()` initialized elements in `extent.location`, unchanged during `'a`.
    pub(crate) unsafe fn new(start: *const u8, extent: Extent) -> View<'a> {
        View { start, extent, lifetime: PhantomData }
    }

    /// A host slice as a view of one row.
    pub fn of<E: Element>(slice: &'a [E]) -> View<'a> {
        // SAFETY: the slice has `len` elements of this type, and is borrowed for `'a`.
        unsafe { View::new(slice.as_ptr().cast(), host_row::<E>(slice.len())) }
    }

    pub fn rows(&self) -> usize {
        self.extent.rows
    }

    pub fn cols(&self) -> usize {
        self.extent.cols
    }

    pub fn len(&self) -> usize {
        self.extent.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.extent.dtype
    }

    pub fn location(&self) -> Location {
        self.extent.location
    }

    /// The address in device memory, for kernels.
    ///
    /// # Panics
    /// If the view is in pageable host memory.
    pub fn address(&self) -> u64 {
        self.extent.device_address(self.start)
    }

    /// A range of elements as one row.
    pub fn part(self, range: Range<usize>) -> View<'a> {
        let (offset, extent) = self.extent.part(&range);
        // SAFETY: inside the memory that this view borrows.
        unsafe { View::new(self.start.add(offset), extent) }
    }

    /// A range of rows.
    pub fn rows_of(self, range: Range<usize>) -> View<'a> {
        let (rows, cols) = (range.len(), self.cols());
        self.part(range.start * cols..range.end * cols).shaped(rows, cols)
    }

    /// The same elements with another shape.
    pub fn shaped(self, rows: usize, cols: usize) -> View<'a> {
        View { extent: self.extent.shaped(rows, cols), ..self }
    }

    /// The elements as a host slice.
    ///
    /// # Panics
    /// If the view has another element type, or is in memory that the host cannot address.
    pub fn host<E: Element>(self) -> &'a [E] {
        self.extent.check_host::<E>();
        // SAFETY: `start` points to `len` elements of this type in host memory, borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len()) }
    }
}

impl<'a> View<'a> {
    /// The bytes, in host memory.
    pub(crate) fn host_bytes(self) -> &'a [u8] {
        assert!(self.location().is_host_accessible());
        // SAFETY: `start` points to this many bytes in host memory, borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(self.start, self.len() * self.dtype().bytes()) }
    }
}

impl ViewMut<'_> {
    /// The bytes, in host memory.
    pub(crate) fn host_bytes(&mut self) -> &mut [u8] {
        assert!(self.location().is_host_accessible());
        // SAFETY: `start` points to this many bytes in host memory, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len() * self.dtype().bytes()) }
    }
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.extent, f)
    }
}

impl fmt::Debug for ViewMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.extent, f)
    }
}

impl<'a> ViewMut<'a> {
    /// # Safety
    /// `start` must point to `extent.len()` elements in `extent.location`, not accessed by others during `'a`.
    pub(crate) unsafe fn new(start: *mut u8, extent: Extent) -> ViewMut<'a> {
        ViewMut { start, extent, lifetime: PhantomData }
    }

    /// A host slice as a view of one row.
    pub fn of<E: Element>(slice: &'a mut [E]) -> ViewMut<'a> {
        // SAFETY: the slice has `len` elements of this type, and is borrowed mutably for `'a`.
        unsafe { ViewMut::new(slice.as_mut_ptr().cast(), host_row::<E>(slice.len())) }
    }

    pub fn rows(&self) -> usize {
        self.extent.rows
    }

    pub fn cols(&self) -> usize {
        self.extent.cols
    }

    pub fn len(&self) -> usize {
        self.extent.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> Dtype {
        self.extent.dtype
    }

    pub fn location(&self) -> Location {
        self.extent.location
    }

    /// The address in device memory, for kernels.
    ///
    /// # Panics
    /// If the view is in pageable host memory.
    pub fn address(&self) -> u64 {
        self.extent.device_address(self.start)
    }

    /// The same view for a shorter lifetime.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { lifetime: PhantomData, ..*self }
    }

    pub fn as_view(&self) -> View<'_> {
        // SAFETY: this view stays borrowed as long as the other one lives.
        unsafe { View::new(self.start, self.extent) }
    }

    /// A range of elements as one row.
    pub fn part(self, range: Range<usize>) -> ViewMut<'a> {
        let (offset, extent) = self.extent.part(&range);
        // SAFETY: inside the memory that this view borrows, and this view is consumed.
        unsafe { ViewMut::new(self.start.add(offset), extent) }
    }

    /// A range of rows.
    pub fn rows_of(self, range: Range<usize>) -> ViewMut<'a> {
        let (rows, cols) = (range.len(), self.cols());
        self.part(range.start * cols..range.end * cols).shaped(rows, cols)
    }

    /// The elements before `at` and the elements from `at` on, each as one row.
    pub fn split_at(self, at: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        let len = self.len();
        let (offset, tail) = self.extent.part(&(at..len));
        let head = self.extent.row(at);
        // SAFETY: two disjoint parts of the memory that this view borrows, and this view is consumed.
        unsafe { (ViewMut::new(self.start, head), ViewMut::new(self.start.add(offset), tail)) }
    }

    /// The same elements with another shape.
    pub fn shaped(self, rows: usize, cols: usize) -> ViewMut<'a> {
        ViewMut { extent: self.extent.shaped(rows, cols), ..self }
    }

    /// The elements as a host slice.
    ///
    /// # Panics
    /// If the view has another element type, or is in memory that the host cannot address.
    pub fn host<E: Element>(self) -> &'a mut [E] {
        self.extent.check_host::<E>();
        // SAFETY: `start` points to `len` elements of this type in host memory, borrowed mutably for `'a`.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len()) }
    }
}

fn host_row<E: Element>(len: usize) -> Extent {
    Extent { rows: 1, cols: len, dtype: E::DTYPE, location: Location::Host }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{NonNull, without_provenance};

    /// A view of memory that the host cannot address. Nothing may dereference it.
    fn on_device() -> View<'static> {
        let extent = Extent { rows: 3, cols: 4, dtype: Dtype::F32, location: Location::Device };
        // SAFETY: not dereferenced, as the tests show.
        unsafe { View::new(without_provenance(0x1000), extent) }
    }

    #[test]
    fn parts_keep_the_location() {
        let views = [on_device().part(2..7), on_device().rows_of(1..3), on_device().shaped(2, 6)];
        assert!(views.iter().all(|view| view.location() == Location::Device));
        assert_eq!(View::of(&[1.0f32]).location(), Location::Host);
    }

    #[test]
    #[should_panic(expected = "f32[3×4] is in device memory, which the host cannot address")]
    fn host_access_to_device_memory_panics() {
        on_device().host::<f32>();
    }

    #[test]
    #[should_panic(expected = "f32[1×2] is in device memory, which the host cannot address")]
    fn mutable_host_access_to_device_memory_panics() {
        let extent = Extent { rows: 1, cols: 2, dtype: Dtype::F32, location: Location::Device };
        // SAFETY: not dereferenced, as the test shows.
        unsafe { ViewMut::new(NonNull::dangling().as_ptr(), extent) }.host::<f32>();
    }

    #[test]
    fn pinned_memory_is_host_accessible() {
        let values = [1.0f32, 2.0];
        let extent = Extent { location: Location::Pinned, ..host_row::<f32>(2) };
        // SAFETY: the array outlives the view.
        let view = unsafe { View::new(values.as_ptr().cast(), extent) };
        assert_eq!(view.host::<f32>(), values);
    }

    #[test]
    #[should_panic(expected = "u32[1×1] accessed as f32")]
    fn host_access_as_another_type_panics() {
        View::of(&[1u32]).host::<f32>();
    }
}
