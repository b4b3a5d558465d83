//! Collapses small pages into huge pages, which need fewer TLB entries. Only affects memory that is in use.

use crate::memory::segment::{HUGE_PAGE, PAGE, Segment};

/// Since Linux 6.1; synchronous and independent of the system's huge page settings.
const MADV_COLLAPSE: libc::c_int = 25;

/// Collapses the first `len` bytes of a segment, wherever all small pages of a huge page exist. Returns
/// the number of bytes in huge pages.
pub(crate) fn collapse(segment: &Segment, len: usize) -> usize {
    let mut large = 0;
    for start in (0..len / HUGE_PAGE).map(|number| number * HUGE_PAGE) {
        if !is_whole(segment, start) {
            continue;
        }
        // SAFETY: whole pages of a mapping; they keep their content, also while it is moved.
        let done = unsafe { libc::madvise(segment.at(start).cast(), HUGE_PAGE, MADV_COLLAPSE) };
        if done == 0 {
            large += HUGE_PAGE;
        } else if std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            // The kernel does not support it. Other errors affect only this page.
            break;
        }
    }
    large
}

/// Whether all small pages of a huge page exist.
fn is_whole(segment: &Segment, start: usize) -> bool {
    let mut resident = [0u8; HUGE_PAGE / PAGE];
    // SAFETY: the kernel writes a byte for each page of this range of the mapping.
    let status =
        unsafe { libc::mincore(segment.at(start).cast(), HUGE_PAGE, resident.as_mut_ptr()) };
    status == 0 && resident.iter().all(|page| page & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_huge_pages_are_collapsed() {
        let (segment, _offer) = Segment::create(4 * HUGE_PAGE).unwrap();
        // The first is complete, the second partial, the third untouched, the fourth complete.
        for (page, bytes) in [(0, HUGE_PAGE), (1, HUGE_PAGE / 2), (3, HUGE_PAGE)] {
            // SAFETY: inside the segment, which is ours alone.
            unsafe { segment.at(page * HUGE_PAGE).write_bytes(page as u8 + 1, bytes) };
        }
        let large = collapse(&segment, 4 * HUGE_PAGE);
        // A system without huge pages collapses nothing.
        assert!([0, HUGE_PAGE, 2 * HUGE_PAGE].contains(&large), "{large}");
        let whole = [0, 1, 2, 3].map(|page| is_whole(&segment, page * HUGE_PAGE));
        assert_eq!(whole, [true, false, false, true]);
        for (page, bytes) in [(0, HUGE_PAGE), (1, HUGE_PAGE / 2), (3, HUGE_PAGE)] {
            // SAFETY: as above, and nobody writes.
            let content =
                unsafe { std::slice::from_raw_parts(segment.at(page * HUGE_PAGE), bytes) };
            assert!(content.iter().all(|byte| *byte == page as u8 + 1), "page {page}");
        }
    }

    #[test]
    fn released_pages_keep_their_content() {
        let (segment, offer) = Segment::create(3 * HUGE_PAGE).unwrap();
        let again = Segment::open(offer.address(), 3 * HUGE_PAGE).unwrap();
        // SAFETY: inside the segment, which is ours alone.
        unsafe {
            segment.at(5).write(7);
            assert_eq!(*again.at(5), 7);
            again.release_pages();
            assert_eq!((*again.at(5), *segment.at(5)), (7, 7));
        }
    }
}
