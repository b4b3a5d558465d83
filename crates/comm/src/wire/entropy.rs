//! Random bytes from the operating system. There is no fallback to a weaker source.

use std::io;

/// 32 random bytes: a secret, or the nonce of a handshake.
pub(super) fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0u8; 32];
    // `getentropy` needs no file descriptor, of which a flood of connections may leave none.
    // SAFETY: the pointer and length describe `bytes`, which is writable and outlives the call.
    let status = unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) };
    match status {
        0 => Ok(bytes),
        _ => Err(io::Error::last_os_error()),
    }
}
