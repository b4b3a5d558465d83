//! Arbitrary bytes as frames: each is read or rejected, and frames that are read encode to the same bytes.
#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use lockstep_comm::wire::{read_frame, write_frame};

/// Small, so that the fuzzer finds lengths on both sides of it.
const LIMIT: u64 = 4096;

fuzz_target!(|bytes: &[u8]| {
    let mut stream = Cursor::new(bytes);
    let mut written = Vec::new();
    while let Ok((header, payload)) = read_frame(&mut stream, LIMIT) {
        assert!(header.len <= LIMIT);
        write_frame(&mut written, &header, &payload).expect("writing to a vector succeeds");
    }
    assert!(bytes.starts_with(&written));
});
