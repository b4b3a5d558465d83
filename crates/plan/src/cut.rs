//! Cutting something into nearly equal parts.

use std::ops::Range;

/// Part `index` of `len` things cut into `parts`; the first `len % parts` have one more. The shares of
/// collectives are the same.
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
