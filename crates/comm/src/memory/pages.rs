//! Large pages for memory that is in use: the processor looks up few of them where it would look up hundreds of small
//! ones. Never takes memory that was not taken before.

use crate::memory::segment::{LARGE_PAGE, PAGE, Segment};

/// Since Linux 6.1; acts at once, and whatever the system's settings are.
const MADV_COLLAPSE: libc::c_int = 25;

/// Joins the small pages of the first `len` bytes of a segment: wherever all that make up a large one are there. The
/// bytes that lie in large pages now.
pub(crate) fn enlarge(segment: &Segment, len: usize) -> usize {
    let mut large = 0;
    for start in (0..len / LARGE_PAGE).map(|number| number * LARGE_PAGE) {
        if !is_whole(segment, start) {
            continue;
        }
        // SAFETY: whole pages of a mapping, which keep their content, while it is moved as well.
        let done = unsafe { libc::madvise(segment.at(start).cast(), LARGE_PAGE, MADV_COLLAPSE) };
        if done == 0 {
            large += LARGE_PAGE;
        } else if std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            // A kernel that knows nothing of it; otherwise this one could not be had, and its small ones do.
            break;
        }
    }
    large
}

/// Whether all small pages of a large one exist.
fn is_whole(segment: &Segment, start: usize) -> bool {
    let mut there = [0u8; LARGE_PAGE / PAGE];
    // SAFETY: the kernel writes a byte for each page of this range of the mapping.
    let told = unsafe { libc::mincore(segment.at(start).cast(), LARGE_PAGE, there.as_mut_ptr()) };
    told == 0 && there.iter().all(|page| page & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_large_pages_are_joined_and_others_left_alone() {
        let (segment, _offer) = Segment::create(4 * LARGE_PAGE).unwrap();
        // The first whole, the second in part, the third not at all, the fourth whole.
        for (page, bytes) in [(0, LARGE_PAGE), (1, LARGE_PAGE / 2), (3, LARGE_PAGE)] {
            // SAFETY: inside the segment, which is ours alone.
            unsafe { segment.at(page * LARGE_PAGE).write_bytes(page as u8 + 1, bytes) };
        }
        let large = enlarge(&segment, 4 * LARGE_PAGE);
        // A system without large pages has none to give.
        assert!([0, LARGE_PAGE, 2 * LARGE_PAGE].contains(&large), "{large}");
        let whole = [0, 1, 2, 3].map(|page| is_whole(&segment, page * LARGE_PAGE));
        assert_eq!(whole, [true, false, false, true]);
        for (page, bytes) in [(0, LARGE_PAGE), (1, LARGE_PAGE / 2), (3, LARGE_PAGE)] {
            // SAFETY: as above, and nobody writes.
            let kept = unsafe { std::slice::from_raw_parts(segment.at(page * LARGE_PAGE), bytes) };
            assert!(kept.iter().all(|byte| *byte == page as u8 + 1), "page {page}");
        }
    }

    #[test]
    fn what_is_let_go_is_still_there() {
        let (segment, offer) = Segment::create(3 * LARGE_PAGE).unwrap();
        let again = Segment::open(offer.address(), 3 * LARGE_PAGE).unwrap();
        // SAFETY: inside the segment, of which nobody else knows.
        unsafe {
            segment.at(5).write(7);
            assert_eq!(*again.at(5), 7);
            again.let_go();
            assert_eq!((*again.at(5), *segment.at(5)), (7, 7));
        }
    }
}
