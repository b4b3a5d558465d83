//! Reading and writing the memory of another process of this host, by the kernel's hand
//! (process_vm_readv): one copy where a shared buffer would take two. Not every system allows it, so
//! a group tries it once, when it is made, and does without if any member may not.

use crate::call::error::Result;
use crate::call::fold::Op;
use crate::world::World;
use std::io;
use std::sync::atomic::Ordering;

/// Finds out how the ranks of each host may reach each other's buffers, if all of them want to.
pub(crate) fn agree(world: &World, wanted: bool) -> Result<()> {
    let mut verdict = [i32::from(wanted)];
    world.all_reduce(&mut verdict, Op::Min)?;
    let direct = verdict[0] == 1;
    world.context().direct_access.store(direct, Ordering::Relaxed);
    if direct {
        try_pull(world)?;
        crate::memory::heap::share(world)?;
    }
    Ok(())
}

/// Every rank tries to read a number from every other of its host; only if all succeed is it done.
fn try_pull(world: &World) -> Result<()> {
    let secret_number = Box::new(0x010c_57e9_u64 ^ world.rank() as u64);
    let own = [i64::from(std::process::id()), (&raw const *secret_number) as i64];
    let mut all = vec![0i64; 2 * world.size()];
    world.all_gather(&own, &mut all)?;
    let hosts = world.hosts();
    let readable = |rank: usize| {
        let from = Remote { pid: all[2 * rank] as u32, at: all[2 * rank + 1] as u64 };
        let mut number = 0u64;
        // SAFETY: our own variable, eight bytes long.
        let pulled = unsafe { pull(from, (&raw mut number).cast(), 8) };
        pulled.is_ok() && number == 0x010c_57e9 ^ rank as u64
    };
    let mut peers = (0..world.size()).filter(|r| hosts[*r] == hosts[world.rank()]);
    let mut verdict = [i32::from(peers.all(readable))];
    // Also keeps everybody's number alive until all have read it.
    world.all_reduce(&mut verdict, Op::Min)?;
    drop(secret_number);
    world.context().may_pull.store(verdict[0] == 1, Ordering::Relaxed);
    Ok(())
}

/// Memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub pid: u32,
    pub at: u64,
}

impl Remote {
    pub(crate) fn offset(self, bytes: usize) -> Remote {
        Remote { at: self.at + bytes as u64, ..self }
    }
}

/// Copies `len` bytes from another process to `to`.
///
/// # Safety
/// `to` must be ours to write for `len` bytes.
pub(crate) unsafe fn pull(from: Remote, to: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: the kernel checks both address ranges; the local one is the caller's promise.
    unsafe { transfer(libc::process_vm_readv, from, to, len) }
}

/// Copies `len` bytes at `from` to another process.
///
/// # Safety
/// `from` must be readable for `len` bytes, and the other process must expect the write.
pub(crate) unsafe fn push(to: Remote, from: *const u8, len: usize) -> io::Result<()> {
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

unsafe fn transfer(call: Call, remote: Remote, local: *mut u8, len: usize) -> io::Result<()> {
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
