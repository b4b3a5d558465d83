//! Where queries, keys and values lie: columns of a matrix, usually of one that holds all three.

use std::marker::PhantomData;
use std::ops::Range;

/// Where the rows of one of q, k, v lie: row r of batch b starts at `data[(b * len + r) * stride + offset]`,
/// head h at `+ h * head_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, E> {
    pub data: &'a [E],
    pub offset: usize,
    pub stride: usize,
}

/// The same, to write to. Several may share one matrix, each with columns of its own.
///
/// ```
/// use lockstep_kernels::cpu::attention::RowsMut;
///
/// // Two tokens; a query of two heads of four, a key and a value of one.
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

// SAFETY: it stands for a mutable borrow of its columns, which no other value reaches.
unsafe impl<E: Send> Send for RowsMut<'_, E> {}

impl<'a, E> RowsMut<'a, E> {
    /// All columns of a matrix of `stride` columns.
    pub fn whole(data: &'a mut [E], stride: usize) -> RowsMut<'a, E> {
        #[allow(clippy::single_range_in_vec_init)] // one part, of all columns
        let [all] = RowsMut::columns(data, stride, [0..stride]);
        all
    }

    /// Parts of a matrix of `stride` columns.
    ///
    /// # Panics
    /// When two of the parts share a column, or one goes past the last.
    pub fn columns<const N: usize>(
        data: &'a mut [E],
        stride: usize,
        parts: [Range<usize>; N],
    ) -> [RowsMut<'a, E>; N] {
        for (i, part) in parts.iter().enumerate() {
            assert!(
                part.start <= part.end && part.end <= stride,
                "columns {part:?} of a matrix that has {stride}"
            );
            for other in &parts[..i] {
                let apart = part.end <= other.start || other.end <= part.start;
                assert!(apart, "columns {part:?} and {other:?} overlap");
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

    /// How many columns it may write.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Rows as the tiles see them: checked once against their shape, then reached by row and column.
#[derive(Clone, Copy)]
pub(super) struct Reach<E> {
    start: *mut E,
    stride: usize,
}

// SAFETY: a `Reach` is made from a borrow that outlives the call which shares it among the team, and the
// team's members write to rows or columns that no other member touches.
unsafe impl<E: Send> Send for Reach<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Reach<E> {}

impl<E> Reach<E> {
    /// # Panics
    /// When `rows` rows of `width` columns are more than what is there.
    pub fn read(from: &Rows<'_, E>, rows: usize, width: usize, name: &str) -> Reach<E> {
        check(from.data.len(), from.offset, from.stride, rows, width, name);
        // `wrapping_add`, as an offset may point past the end when there are no rows.
        Reach {
            start: from.data.as_ptr().cast_mut().wrapping_add(from.offset),
            stride: from.stride,
        }
    }

    pub fn write(to: &RowsMut<'_, E>, rows: usize, width: usize, name: &str) -> Reach<E> {
        assert!(
            width <= to.width,
            "{name}: {width} columns to write, {} to write them to",
            to.width
        );
        check(to.len, to.offset, to.stride, rows, width, name);
        Reach { start: to.start.wrapping_add(to.offset), stride: to.stride }
    }

    /// The same elements as bits. They must be bf16.
    pub fn halves(&self) -> Reach<u16> {
        debug_assert_eq!(size_of::<E>(), size_of::<u16>());
        Reach { start: self.start.cast(), stride: self.stride }
    }

    /// Where a row's `column` lies; inside the matrix when both are inside what was checked.
    #[inline(always)]
    pub fn at(&self, row: usize, column: usize) -> *mut E {
        self.start.wrapping_add(row * self.stride + column)
    }
}

fn check(len: usize, offset: usize, stride: usize, rows: usize, width: usize, name: &str) {
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + offset + width };
    assert!(
        needed <= len && (rows <= 1 || width <= stride),
        "{name}: {rows} rows of {width} at offset {offset} and stride {stride} need {needed} elements, not {len}"
    );
}
