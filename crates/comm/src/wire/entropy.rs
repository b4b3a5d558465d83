//! Bytes nobody can guess, from the operating system.
//! Never falls back to a weaker source: where the system has none, the caller gets the error.

use std::io;

/// Thirty-two fresh random bytes: a secret, or the nonce of one handshake.
pub(super) fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0u8; 32];
    // `getentropy` and not a file: a process that has no file descriptors left, which is what a
    // flood of connections can bring about, still greets its real peers.
    // SAFETY: the pointer and length describe `bytes`, which is writable and outlives the call.
    let status = unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) };
    match status {
        0 => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}
