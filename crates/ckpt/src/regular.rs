//! Regular files only: opening a named pipe would block, and a device may be endless.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file for reading.
pub(crate) fn open(path: &Path) -> Result<File> {
    // Without the flag, opening a named pipe waits for a writer. Regular files ignore it.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.and_then(check).map_err(Error::system("open", path))
}

/// Fails unless the file is a regular one.
pub(crate) fn check(file: File) -> io::Result<File> {
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// Reads a regular file of at most `max` bytes.
pub(crate) fn read(path: &Path, max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max + 1).read_to_end(&mut bytes).map_err(Error::system("read", path))?;
    match bytes.len() as u64 > max {
        true => Err(Error::malformed(path, format!("larger than {} MiB", max >> 20))),
        false => Ok(bytes),
    }
}
