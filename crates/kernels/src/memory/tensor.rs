//! A tensor owns a piece of a pool and returns it when it is dropped.

use std::sync::Arc;

use super::pool::Allocated;
use super::{Extent, Location, OutOfMemory, Pool, Side, Tag, View, ViewMut};
use crate::Dtype;

/// A contiguous, row-major (rows, cols) matrix in device memory.
///
/// A clone is a second handle to the same memory. While there are several handles, all of them are read-only; the
/// backward pass keeps activations this way without copying them.
pub struct Tensor {
    pool: Arc<Pool>,
    allocation: u32,
    start: *mut u8,
    extent: Extent,
}

// SAFETY: a tensor owns a piece of plain memory; the pool behind it is locked.
unsafe impl Send for Tensor {}
// SAFETY: a shared reference to a tensor allows reading only.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// A tensor with unspecified contents: zeros, or data of an earlier tensor.
    pub(crate) fn new(
        pool: &Arc<Pool>,
        rows: usize,
        cols: usize,
        dtype: Dtype,
        tag: Tag,
    ) -> Tensor {
        Tensor::on(Side::Device, pool, [rows, cols], dtype, tag)
    }

    /// A tensor with unspecified contents, on one side of a pool.
    pub(crate) fn on(
        side: Side,
        pool: &Arc<Pool>,
        [rows, cols]: [usize; 2],
        dtype: Dtype,
        tag: Tag,
    ) -> Tensor {
        let allocated = pool.allocate(rows * cols * dtype.bytes(), tag, side);
        Tensor::of(pool, allocated, [rows, cols], dtype)
    }

    /// [`Tensor::on`], if there is memory left.
    pub(crate) fn try_on(
        side: Side,
        pool: &Arc<Pool>,
        [rows, cols]: [usize; 2],
        dtype: Dtype,
        tag: Tag,
    ) -> Result<Tensor, OutOfMemory> {
        let allocated = pool.try_allocate(rows * cols * dtype.bytes(), tag, side)?;
        Ok(Tensor::of(pool, allocated, [rows, cols], dtype))
    }

    fn of(
        pool: &Arc<Pool>,
        allocated: Allocated,
        [rows, cols]: [usize; 2],
        dtype: Dtype,
    ) -> Tensor {
        let Allocated { index: allocation, start, location } = allocated;
        let extent = Extent { rows, cols, dtype, location };
        Tensor { pool: pool.clone(), allocation, start, extent }
    }

    /// The tag that the memory is counted under.
    pub(crate) fn tag(&self) -> Tag {
        self.pool.tag(self.allocation)
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

    pub fn view(&self) -> View<'_> {
        // SAFETY: the memory belongs to this tensor and is not written while it is borrowed: `view_mut` needs the
        // only handle, mutably.
        unsafe { View::new(self.start, self.extent) }
    }

    /// # Panics
    /// If there are other handles to this memory.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        assert!(!self.is_shared(), "{self:?} has other handles, so it is read-only");
        // SAFETY: this is the only handle to the memory, and it is borrowed mutably.
        unsafe { ViewMut::new(self.start, self.extent) }
    }

    /// The memory that a transfer writes. Unlike [`Tensor::view_mut`] it does not check for other handles.
    ///
    /// # Safety
    /// Nothing reads or writes the elements of `range` while the view, or an operation that was given it, is in use.
    pub(crate) unsafe fn transfer_target(&self, range: std::ops::Range<usize>) -> ViewMut<'_> {
        // SAFETY: the memory belongs to this tensor; the caller has exclusive use of the range.
        unsafe { ViewMut::new(self.start, self.extent) }.shaped(1, self.len()).part(range)
    }

    /// Whether there are other handles to this memory.
    pub fn is_shared(&self) -> bool {
        self.pool.handles(self.allocation) > 1
    }

    /// The same elements with another shape.
    pub fn shaped(mut self, rows: usize, cols: usize) -> Tensor {
        self.extent = self.extent.shaped(rows, cols);
        self
    }

    /// Counts the memory under another tag from now on.
    pub fn retag(&self, tag: Tag) {
        self.pool.retag(self.allocation, tag);
    }
}

impl Clone for Tensor {
    fn clone(&self) -> Tensor {
        self.pool.share(self.allocation);
        Tensor { pool: self.pool.clone(), ..*self }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.pool.drop_handle(self.allocation);
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.extent)
    }
}
