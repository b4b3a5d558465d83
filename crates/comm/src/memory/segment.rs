//! Memory that several ranks of one host have mapped. Knows nothing about its content.
//!
//! A segment is an anonymous file (memfd): it has no name in any file system, so the kernel frees it
//! when the last process that maps it has ended for any reason. Peers open it through `/proc/PID/fd/N`
//! of the rank that created it, which works for threads of one process as well.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Size of a small page and of a huge page.
pub(crate) const PAGE: usize = 4096;
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Address at which the other ranks of the host can open a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Address {
    pub pid: u64,
    pub fd: u64,
}

/// A mapping of a segment; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Segment {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread. Its content is accessed through atomics or
// under protocols that define one writer for each byte.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Open file through which others map a new segment. May be dropped once they have mapped it.
#[derive(Debug)]
pub(crate) struct Offer {
    file: OwnedFd,
}

impl Offer {
    pub(crate) fn address(&self) -> Address {
        Offer::address_of(&self.file)
    }

    /// Address of an open file of this process.
    pub(crate) fn address_of(file: &OwnedFd) -> Address {
        Address { pid: u64::from(std::process::id()), fd: file.as_raw_fd() as u64 }
    }

    /// The file itself, for a segment that is offered for as long as the process lives.
    pub(crate) fn into_file(self) -> OwnedFd {
        self.file
    }
}

impl Segment {
    /// Creates a segment of `len` zero bytes. Pages take memory once they are touched.
    pub(crate) fn create(len: usize) -> io::Result<(Segment, Offer)> {
        // SAFETY: the name is a C string; returns a descriptor or -1.
        let fd = unsafe { libc::memfd_create(c"lockstep".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created and has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain call on an open descriptor.
        if unsafe { libc::ftruncate(fd, len as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((Segment::map(&file, len)?, Offer { file }))
    }

    /// Maps a segment that another rank of this host created.
    pub(crate) fn open(address: Address, len: usize) -> io::Result<Segment> {
        let path = format!("/proc/{}/fd/{}", address.pid, address.fd);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        let actual = file.metadata()?.len();
        if actual != len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the segment has {actual} bytes, expected {len}"),
            ));
        }
        Segment::map(&file.into(), len)
    }

    fn map(file: &OwnedFd, len: usize) -> io::Result<Segment> {
        // Mapping zero bytes is an error.
        let len = len.max(1);
        let range = AddressRange::reserve(len)?;
        // SAFETY: replaces only the range that was just reserved.
        let base = unsafe {
            libc::mmap(
                range.start,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | range.fixed,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let why = io::Error::last_os_error();
            range.release(len);
            return Err(why);
        }
        Ok(Segment { base: base.cast(), len })
    }

    /// Address of byte `offset`; panics past the end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} is outside a segment of {} bytes", self.len);
        // SAFETY: inside the mapping, or one past its end.
        unsafe { self.base.add(offset) }
    }

    /// Unmaps the pages that this mapping has touched. Their content stays in the file.
    pub(crate) fn release_pages(&self) {
        // SAFETY: our own mapping of a shared file; the next access maps the page again.
        unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_DONTNEED) };
    }

    /// A shared structure of atomics at `offset`.
    ///
    /// # Safety
    /// All ranks must use a `T` at this offset. `T` must allow concurrent use from several processes and
    /// be valid when all its bytes are zero.
    pub(crate) unsafe fn shared<T>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping and aligned; the rest is guaranteed by the caller.
        unsafe { &*self.at(offset).cast::<T>() }
    }
}

/// Address range for a mapping.
struct AddressRange {
    start: *mut libc::c_void,
    fixed: libc::c_int,
}

impl AddressRange {
    /// Any range. A segment that may contain huge pages is aligned so that they match those of the file.
    fn reserve(len: usize) -> io::Result<AddressRange> {
        if len < HUGE_PAGE {
            return Ok(AddressRange { start: std::ptr::null_mut(), fixed: 0 });
        }
        let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let size = len + HUGE_PAGE;
        // SAFETY: a new mapping at an address chosen by the kernel affects no other memory.
        let all = unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, none, -1, 0) };
        if all == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = all.cast::<u8>().align_offset(HUGE_PAGE);
        let start = all.wrapping_byte_add(before);
        let end = start.wrapping_byte_add(len.next_multiple_of(PAGE));
        let after = all.addr() + size - end.addr();
        // SAFETY: whole pages of the new mapping, before and after the aligned part, that nobody uses.
        unsafe {
            if before > 0 {
                libc::munmap(all, before);
            }
            if after > 0 {
                libc::munmap(end, after);
            }
        }
        Ok(AddressRange { start, fixed: libc::MAP_FIXED })
    }

    /// Gives the range back after a failed mapping.
    fn release(self, len: usize) {
        if self.fixed != 0 {
            // SAFETY: a range that we reserved and nobody uses.
            unsafe { libc::munmap(self.start, len) };
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: our own mapping; references into it borrow from `self`.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
