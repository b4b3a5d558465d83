//! Queries, keys and values as columns of a matrix, usually of one that holds all three.

use std::marker::PhantomData;
use std::ops::Range;

/// Rows of q, k or v: row r of batch b starts at `data[(b * len + r) * stride + offset]`, head h at `+ h * head_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, E> {
    pub data: &'a [E],
    pub offset: usize,
    pub stride: usize,
}

impl<'a, E> Rows<'a, E> {
    /// All columns of a matrix of `stride` columns.
    pub fn whole(data: &'a [E], stride: usize) -> Rows<'a, E> {
        Rows { data, offset: 0, stride }
    }
}

/// Mutable `Rows`. Several may share one matrix, with disjoint columns.
///
/// ```
/// use lockstep_kernels::cpu::attention::RowsMut;
///
/// // Two tokens with a query of two heads of dim 4, and a key and a value of one head.
/// let mut qkv = vec![0f32; 2 * 16];
/// let [q, k, v] = RowsMut::columns(&mut qkv, 16, [0..8, 8..12, 12..16]);
/// assert_eq!((q.width(), k.width(), v.width()), (8, 4, 4));
/// ```
pub struct RowsMut<'a, E> {
    start: *mut E,
    len: usize,
    offset: usize,
    width: usize,
    stride: usize,
    matrix: PhantomData<&'a mut [E]>,
}

// SAFETY: it represents a mutable borrow of its columns, which no other value can access.
unsafe impl<E: Send> Send for RowsMut<'_, E> {}

impl<'a, E> RowsMut<'a, E> {
    /// All columns of a matrix of `stride` columns.
    pub fn whole(data: &'a mut [E], stride: usize) -> RowsMut<'a, E> {
        #[allow(clippy::single_range_in_vec_init)] // one part of all columns
        let [all] = RowsMut::columns(data, stride, [0..stride]);
        all
    }

    /// Disjoint column ranges of a matrix of `stride` columns.
    ///
    /// # Panics
    /// If two ranges overlap, or one exceeds the matrix.
    pub fn columns<const N: usize>(
        data: &'a mut [E],
        stride: usize,
        parts: [Range<usize>; N],
    ) -> [RowsMut<'a, E>; N] {
        for (i, part) in parts.iter().enumerate() {
            assert!(
                part.start <= part.end && part.end <= stride,
                "columns {part:?} are out of range: the matrix has {stride}"
            );
            for other in &parts[..i] {
                let disjoint = part.end <= other.start || other.end <= part.start;
                assert!(disjoint, "columns {part:?} and {other:?} overlap");
            }
        }
        let (start, len) = (data.as_mut_ptr(), data.len());
        parts.map(|part| RowsMut {
            start,
            len,
            offset: part.start,
            width: part.end - part.start,
            stride,
            matrix: PhantomData,
        })
    }

    /// Number of columns.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Unchecked access to rows by row and column, after one check of the shape.
#[derive(Clone, Copy)]
pub(super) struct RawRows<E> {
    start: *mut E,
    stride: usize,
}

// SAFETY: a `RawRows` comes from a borrow that outlives the call that shares it among threads, and threads write
// disjoint rows or columns.
unsafe impl<E: Send> Send for RawRows<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for RawRows<E> {}

impl<E> RawRows<E> {
    /// # Panics
    /// If the matrix is smaller than `rows` rows of `width` columns.
    pub fn new(from: &Rows<'_, E>, rows: usize, width: usize, name: &str) -> RawRows<E> {
        check(from.data.len(), from.offset, from.stride, (rows, width), name);
        // `wrapping_add`, because the offset may be past the end if there are no rows.
        RawRows {
            start: from.data.as_ptr().cast_mut().wrapping_add(from.offset),
            stride: from.stride,
        }
    }

    pub fn new_mut(to: &RowsMut<'_, E>, rows: usize, width: usize, name: &str) -> RawRows<E> {
        assert!(width <= to.width, "{name}: {width} columns do not fit in a range of {}", to.width);
        check(to.len, to.offset, to.stride, (rows, width), name);
        RawRows { start: to.start.wrapping_add(to.offset), stride: to.stride }
    }

    /// The elements as bits. They must be bf16.
    pub fn as_bits(&self) -> RawRows<u16> {
        debug_assert_eq!(size_of::<E>(), size_of::<u16>());
        RawRows { start: self.start.cast(), stride: self.stride }
    }

    /// Address of an element; within the matrix if row and column are within the checked range.
    #[inline(always)]
    pub fn at(&self, row: usize, column: usize) -> *mut E {
        self.start.wrapping_add(row * self.stride + column)
    }
}

fn check(len: usize, offset: usize, stride: usize, (rows, width): (usize, usize), name: &str) {
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + offset + width };
    assert!(
        needed <= len && (rows <= 1 || width <= stride),
        "{name}: {rows} rows of {width} at offset {offset} and stride {stride} need {needed} elements, not {len}"
    );
}
