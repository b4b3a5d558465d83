//! Splits a buffer into nearly equal parts, one for each member. Pure.

use std::ops::Range;

/// `count` elements of `width` bytes in `parts` parts; the first `count % parts` have one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    pub count: usize,
    pub parts: usize,
    pub width: usize,
}

impl Partition {
    /// Splits `bytes` bytes.
    pub(crate) fn of_bytes(bytes: usize, parts: usize, width: usize) -> Partition {
        Partition { count: bytes / width, parts, width }
    }

    /// Elements of part `i`.
    pub fn elements(&self, i: usize) -> Range<usize> {
        assert!(i < self.parts, "part {i} of {}", self.parts);
        let (each, more) = (self.count / self.parts, self.count % self.parts);
        let start = i * each + i.min(more);
        start..start + each + usize::from(i < more)
    }

    /// Bytes of part `i`.
    pub fn bytes(&self, i: usize) -> Range<usize> {
        let elements = self.elements(i);
        elements.start * self.width..elements.end * self.width
    }

    /// Bytes of all parts.
    pub(crate) fn parts(&self) -> Vec<Range<usize>> {
        (0..self.parts).map(|i| self.bytes(i)).collect()
    }

    /// Bytes of the consecutive parts `range.start..range.end`.
    pub(crate) fn span(&self, range: Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        self.bytes(range.start).start..self.bytes(range.end - 1).end
    }

    /// Size of the largest part in bytes.
    pub fn largest(&self) -> usize {
        self.count.div_ceil(self.parts) * self.width
    }
}

/// The shard of `count` elements that member `i` of `parts` holds after a reduce-scatter and
/// contributes to an all-gather.
///
/// ```
/// use lockstep_comm::shard_range;
/// assert_eq!(shard_range(10, 4, 0), 0..3);
/// assert_eq!(shard_range(10, 4, 3), 8..10);
/// ```
pub fn shard_range(count: usize, parts: usize, i: usize) -> Range<usize> {
    Partition { count, parts, width: 1 }.elements(i)
}

/// Borrows two disjoint ranges of one buffer: one to read, one to write.
pub(crate) fn split_disjoint(
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

/// Length of the longest range.
pub(crate) fn longest(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|r| r.len()).max().unwrap_or(0)
}

/// Consecutive ranges of these many elements.
pub(crate) fn packed(counts: &[usize], width: usize) -> Vec<Range<usize>> {
    let mut at = 0;
    let range = |count: &usize| {
        let start = at;
        at += count * width;
        start..at
    };
    counts.iter().map(range).collect()
}
