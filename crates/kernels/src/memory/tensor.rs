//! A tensor owns a piece of a device's memory and gives it back when it is dropped.

use std::sync::Arc;

use super::{Pool, Tag, View, ViewMut};
use crate::Dtype;

/// A (rows, cols) matrix in device memory, row by row without gaps.
///
/// A clone is a second handle to the same memory, which both may then only read: this is how what a backward
/// pass still needs is kept without a copy.
pub struct Tensor {
    pool: Arc<Pool>,
    holder: u32,
    start: *mut u8,
    rows: usize,
    cols: usize,
    dtype: Dtype,
}

// SAFETY: a tensor is the right to a piece of plain memory; the pool behind it is locked.
unsafe impl Send for Tensor {}
// SAFETY: through a shared reference a tensor can only be read.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Memory with whatever was last written there, or zeros: to be written before it is read.
    pub(crate) fn new(
        pool: &Arc<Pool>,
        rows: usize,
        cols: usize,
        dtype: Dtype,
        tag: Tag,
    ) -> Tensor {
        let (holder, start) = pool.take(rows * cols * dtype.bytes(), tag);
        Tensor { pool: pool.clone(), holder, start, rows, cols, dtype }
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

    /// To read.
    pub fn view(&self) -> View<'_> {
        // SAFETY: the piece is this tensor's, and nobody writes it while it is borrowed: `view_mut` needs
        // the only handle, mutably.
        unsafe { View::new(self.start, self.rows, self.cols, self.dtype) }
    }

    /// # Panics
    /// When there are other handles to this memory.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        assert!(!self.is_shared(), "a tensor that others still read cannot be written");
        // SAFETY: this is the only handle to the piece, and it is borrowed mutably.
        unsafe { ViewMut::new(self.start, self.rows, self.cols, self.dtype) }
    }

    /// Whether there are other handles to this memory.
    pub fn is_shared(&self) -> bool {
        self.pool.handles(self.holder) > 1
    }

    /// The same elements in other rows.
    pub fn shaped(mut self, rows: usize, cols: usize) -> Tensor {
        assert_eq!(
            self.len(),
            rows * cols,
            "{}×{} elements cannot be {rows}×{cols}",
            self.rows,
            self.cols
        );
        (self.rows, self.cols) = (rows, cols);
        self
    }

    /// Counts the memory under another tag from now on.
    pub fn retag(&self, tag: Tag) {
        self.pool.retag(self.holder, tag);
    }
}

impl Clone for Tensor {
    fn clone(&self) -> Tensor {
        self.pool.share(self.holder);
        Tensor { pool: self.pool.clone(), ..*self }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.pool.drop_handle(self.holder);
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}×{}]", self.dtype, self.rows, self.cols)
    }
}
