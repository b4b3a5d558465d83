//! Appending to a file whole or not at all. Knows nothing of what is written.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};

/// Appends, and takes back what a full disk let through of it: what comes later finds the file's end as it was.
pub(crate) fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    let end = file.metadata()?.len();
    file.write_all(bytes).inspect_err(|_| {
        // Shortening needs no room. Where it fails too, the error at hand says what is wrong.
        let _ = file.set_len(end).and_then(|()| file.seek(SeekFrom::End(0)));
    })
}
