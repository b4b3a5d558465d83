//! Appends to a file completely or not at all.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};

/// Appends `bytes`. If the write fails part-way, for example on a full disk, the file is truncated to its old length.
pub(crate) fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    let end = file.metadata()?.len();
    file.write_all(bytes).inspect_err(|_| {
        // Truncating needs no space. If it fails too, the first error is the one to report.
        let _ = file.set_len(end).and_then(|()| file.seek(SeekFrom::End(0)));
    })
}
