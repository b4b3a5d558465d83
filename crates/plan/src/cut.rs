//! Splitting a range into nearly equal parts.

use std::ops::Range;

/// Range `index` of `0..len` split into `parts`; the first `len % parts` ranges have one element more. Collectives
/// split buffers in the same way.
///
/// ```
/// use lockstep_plan::cut;
/// assert_eq!([cut(8, 3, 0), cut(8, 3, 1), cut(8, 3, 2)], [0..3, 3..6, 6..8]);
/// ```
pub fn cut(len: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, more) = (len / parts, len % parts);
    let start = index * each + index.min(more);
    start..start + each + usize::from(index < more)
}
