//! Copies between the memory of two processes of a host through the kernel (process_vm_readv and
//! process_vm_writev): one copy where a shared buffer takes two. Not every system allows it, so a world
//! tries it once when it starts.

use std::io;

/// An address in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    pub pid: u32,
    pub at: u64,
}

impl RemoteAddress {
    pub(crate) fn offset(self, bytes: usize) -> RemoteAddress {
        RemoteAddress { at: self.at + bytes as u64, ..self }
    }
}

/// Copies `len` bytes from another process to `to`.
///
/// # Safety
/// `to` must be valid for writes of `len` bytes.
pub(crate) unsafe fn pull(from: RemoteAddress, to: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: the kernel checks both address ranges; the local one is guaranteed by the caller.
    unsafe { transfer(libc::process_vm_readv, from, to, len) }
}

/// Copies `len` bytes at `from` to another process.
///
/// # Safety
/// `from` must be readable for `len` bytes, and the other process must expect the write.
pub(crate) unsafe fn push(to: RemoteAddress, from: *const u8, len: usize) -> io::Result<()> {
    // SAFETY: as above; the kernel only reads the local range.
    unsafe { transfer(libc::process_vm_writev, to, from.cast_mut(), len) }
}

type Call = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

unsafe fn transfer(
    call: Call,
    remote: RemoteAddress,
    local: *mut u8,
    len: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let here = libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: len - done };
        let there = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(remote.at as usize + done),
            iov_len: len - done,
        };
        // SAFETY: one range on each side; the kernel checks that they exist.
        let moved = unsafe { call(remote.pid as i32, &here, 1, &there, 1, 0) };
        match moved {
            n if n > 0 => done += n as usize,
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}
