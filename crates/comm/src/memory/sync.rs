//! Atomics and futex waits of the shared-memory protocols; replaced by loom's under `--cfg loom`, so that the
//! protocols can be checked in every interleaving.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Sleeps until `word` is woken, for at most `limit`, unless it no longer equals `seen`. May wake
/// spuriously.
#[cfg(not(loom))]
pub(crate) fn futex_wait(word: &AtomicU32, seen: u32, limit: std::time::Duration) {
    let timeout = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    };
    // SAFETY: the word outlives the call, and the kernel only reads it and the timeout. Not PRIVATE, because
    // the waker may be another process.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
    }
}

/// Wakes all sleepers on `word`.
#[cfg(not(loom))]
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the kernel uses the address only as a key.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}

/// Waits briefly for another rank.
#[cfg(not(loom))]
pub(crate) fn pause() {
    std::thread::sleep(std::time::Duration::from_micros(100));
}

#[cfg(loom)]
pub(crate) fn pause() {
    loom::thread::yield_now();
}
