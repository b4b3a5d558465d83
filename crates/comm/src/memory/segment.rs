//! Memory that several ranks of one host have mapped. Knows nothing of what lies in it.
//!
//! A segment is an anonymous file (memfd): it has no name in any file system, so the kernel frees it
//! when the last process that maps it is gone, however that process ended. Peers reach it through
//! `/proc/PID/fd/N` of the rank that made it, which works for the threads of one process as well.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Of the smallest and of large pages.
pub(crate) const PAGE: usize = 4096;
pub(crate) const LARGE_PAGE: usize = 2 << 20;

/// Where a segment can be found by the other ranks of the host.
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

// SAFETY: the mapping belongs to the process, not to a thread. What lies in it is accessed through
// atomics or under protocols that name the one writer of each byte.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// The open end by which others find a new segment; once they have it mapped it can be dropped.
#[derive(Debug)]
pub(crate) struct Offer {
    file: OwnedFd,
}

impl Offer {
    pub(crate) fn address(&self) -> Address {
        Offer::address_of(&self.file)
    }

    /// Where others find an open file of ours.
    pub(crate) fn address_of(file: &OwnedFd) -> Address {
        Address { pid: u64::from(std::process::id()), fd: file.as_raw_fd() as u64 }
    }

    /// The file itself, for a segment that is offered for as long as the process lives.
    pub(crate) fn into_file(self) -> OwnedFd {
        self.file
    }
}

impl Segment {
    /// Makes a segment of `len` zero bytes. Pages cost memory once they are touched.
    pub(crate) fn create(len: usize) -> io::Result<(Segment, Offer)> {
        // SAFETY: the name is a C string; a descriptor comes back or -1.
        let fd = unsafe { libc::memfd_create(c"lockstep".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain call on an open descriptor.
        if unsafe { libc::ftruncate(fd, len as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((Segment::map(&file, len)?, Offer { file }))
    }

    /// Maps the segment that a rank of this host made.
    pub(crate) fn open(address: Address, len: usize) -> io::Result<Segment> {
        let path = format!("/proc/{}/fd/{}", address.pid, address.fd);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        let there = file.metadata()?.len();
        if there != len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the segment has {there} bytes, {len} were expected"),
            ));
        }
        Segment::map(&file.into(), len)
    }

    fn map(file: &OwnedFd, len: usize) -> io::Result<Segment> {
        // A mapping of length 0 is an error of its own kind.
        let len = len.max(1);
        let room = Room::of(len)?;
        // SAFETY: what is mapped over is room that we have just made for it.
        let base = unsafe {
            libc::mmap(
                room.start,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | room.fixed,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let why = io::Error::last_os_error();
            room.leave(len);
            return Err(why);
        }
        Ok(Segment { base: base.cast(), len })
    }

    /// The address of byte `offset`; panics past the end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} lies outside a segment of {}", self.len);
        // SAFETY: inside the mapping, or one past its end.
        unsafe { self.base.add(offset) }
    }

    /// Gives up the pages that this mapping has touched. What is in them stays: the file has it.
    pub(crate) fn let_go(&self) {
        // SAFETY: a mapping of ours of a shared file: what is looked at again is looked up again.
        unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_DONTNEED) };
    }

    /// A shared structure made of atomics at `offset`.
    ///
    /// # Safety
    /// All ranks must see a `T` there, `T` must allow concurrent use from several processes and be
    /// valid when all its bytes are zero.
    pub(crate) unsafe fn shared<T>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.len && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping and aligned; the rest is the caller's promise.
        unsafe { &*self.at(offset).cast::<T>() }
    }
}

/// Where a mapping is to go.
struct Room {
    start: *mut libc::c_void,
    fixed: libc::c_int,
}

impl Room {
    /// Anywhere; for what may hold large pages, where those of the file are those of the memory.
    fn of(len: usize) -> io::Result<Room> {
        if len < LARGE_PAGE {
            return Ok(Room { start: std::ptr::null_mut(), fixed: 0 });
        }
        let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let size = len + LARGE_PAGE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no other memory.
        let all = unsafe { libc::mmap(std::ptr::null_mut(), size, libc::PROT_NONE, none, -1, 0) };
        if all == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = all.cast::<u8>().align_offset(LARGE_PAGE);
        let start = all.wrapping_byte_add(before);
        let end = start.wrapping_byte_add(len.next_multiple_of(PAGE));
        let after = all.addr() + size - end.addr();
        // SAFETY: both are whole pages of the room around the aligned part, and nobody knows of them.
        unsafe {
            if before > 0 {
                libc::munmap(all, before);
            }
            if after > 0 {
                libc::munmap(end, after);
            }
        }
        Ok(Room { start, fixed: libc::MAP_FIXED })
    }

    /// Nothing came of it.
    fn leave(self, len: usize) {
        if self.fixed != 0 {
            // SAFETY: room that we have made, and that nobody else knows of.
            unsafe { libc::munmap(self.start, len) };
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours; references into it borrow from `self`.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
