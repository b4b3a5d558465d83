//! Arrays that are in memory or in a mapped file.

use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;

use memmap2::Mmap;

mod sealed {
    /// Numbers without padding for which every bit pattern is valid.
    pub trait Plain: Copy + Default + Send + Sync + 'static {}
    impl Plain for u8 {}
    impl Plain for u16 {}
    impl Plain for u32 {}
    impl Plain for u64 {}
    impl Plain for f32 {}
}
pub(crate) use sealed::Plain;

/// An array that is only read.
pub enum Section<T> {
    Memory(Vec<T>),
    /// Bytes of a mapped file, aligned for T.
    Mapped(Arc<Mmap>, Range<usize>, PhantomData<T>),
}

impl<T: Plain> Section<T> {
    /// Elements of a mapped file. `None` if the range is out of bounds, not aligned or not a whole number of elements.
    pub(crate) fn mapped(map: &Arc<Mmap>, range: Range<usize>) -> Option<Section<T>> {
        let bytes = map.get(range.clone())?;
        let aligned = (bytes.as_ptr() as usize).is_multiple_of(align_of::<T>());
        (aligned && bytes.len().is_multiple_of(size_of::<T>()))
            .then(|| Section::Mapped(Arc::clone(map), range, PhantomData))
    }
}

impl<T: Plain> Deref for Section<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Section::Memory(values) => values,
            Section::Mapped(map, range, _) => {
                let bytes = &map[range.clone()];
                // SAFETY: `mapped` checked bounds, alignment and length, and every bit pattern of T is valid.
                unsafe {
                    std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>())
                }
            }
        }
    }
}

/// The bytes of an array.
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: T has no padding, and u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
