//! Cutting a buffer into nearly equal parts, one for each member. Pure.

use std::ops::Range;

/// `count` elements of `width` bytes in `parts` parts; the first `count % parts` have one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub count: usize,
    pub parts: usize,
    pub width: usize,
}

impl Cut {
    /// The elements of part `i`.
    pub fn elements(&self, i: usize) -> Range<usize> {
        assert!(i < self.parts, "part {i} of {}", self.parts);
        let (each, more) = (self.count / self.parts, self.count % self.parts);
        let start = i * each + i.min(more);
        start..start + each + usize::from(i < more)
    }

    /// The bytes of part `i`.
    pub fn bytes(&self, i: usize) -> Range<usize> {
        let elements = self.elements(i);
        elements.start * self.width..elements.end * self.width
    }

    /// The bytes of all parts.
    pub(crate) fn parts(&self) -> Vec<Range<usize>> {
        (0..self.parts).map(|i| self.bytes(i)).collect()
    }

    /// The bytes of parts `range.start` to `range.end`, which lie side by side.
    pub(crate) fn span(&self, range: Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        self.bytes(range.start).start..self.bytes(range.end - 1).end
    }

    /// The bytes of the largest part.
    pub fn largest(&self) -> usize {
        self.count.div_ceil(self.parts) * self.width
    }
}

/// The part of `count` elements that member `i` of `parts` owns after a reduce-scatter and brings to
/// an all-gather.
///
/// ```
/// use lockstep_comm::share;
/// assert_eq!(share(10, 4, 0), 0..3);
/// assert_eq!(share(10, 4, 3), 8..10);
/// ```
pub fn share(count: usize, parts: usize, i: usize) -> Range<usize> {
    Cut { count, parts, width: 1 }.elements(i)
}

/// Two ranges of one buffer that do not overlap: one to read, one to write.
pub(crate) fn apart(
    bytes: &mut [u8],
    read: Range<usize>,
    write: Range<usize>,
) -> (&[u8], &mut [u8]) {
    if read.is_empty() {
        return (&[], &mut bytes[write]);
    }
    if write.is_empty() {
        return (&bytes[read], &mut []);
    }
    if read.end <= write.start {
        let (low, high) = bytes.split_at_mut(write.start);
        (&low[read], &mut high[..write.end - write.start])
    } else {
        assert!(write.end <= read.start, "{read:?} and {write:?} overlap");
        let (low, high) = bytes.split_at_mut(read.start);
        (&high[..read.end - read.start], &mut low[write])
    }
}
