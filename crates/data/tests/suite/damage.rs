//! Truncated, modified and unrelated files are rejected with a clear error.

use crate::test_dir::TestDir;
use lockstep_data::{Error, TokenFile};
use std::path::Path;

/// Opens the file and reads all of it.
fn examine(path: &Path) -> Result<(), Error> {
    TokenFile::open(path)?.check(|_| ())
}

/// A file of 3 documents and 11 tokens: header to 192, tokens to 216, index to 264, one checksum.
fn good(dir: &TestDir) -> Vec<u8> {
    let path = dir.documents(&["one", "two", "three"]);
    examine(&path).unwrap();
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes.len(), 192 + 24 + 48 + 8);
    bytes
}

fn error_of(dir: &TestDir, bytes: &[u8]) -> String {
    examine(&dir.write("damaged.tokens", bytes)).expect_err("this file is damaged").to_string()
}

#[test]
fn every_changed_byte_is_detected() {
    let dir = TestDir::new();
    let good = good(&dir);
    for at in 0..good.len() {
        for change in [1, 0x80] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            let error = error_of(&dir, &bytes);
            let expected = match at {
                0..8 => "not a token file",
                8..12 => "version",
                12..192 => "header is corrupt",
                192..216 => "the tokens are corrupt",
                216..264 => "the document index entries are corrupt",
                _ => "the checksums are corrupt",
            };
            assert!(error.contains(expected), "byte {at}: {error}");
        }
    }
}

#[test]
fn every_truncation_is_detected() {
    let dir = TestDir::new();
    let good = good(&dir);
    for len in 0..good.len() {
        let error = error_of(&dir, &good[..len]);
        let expected = if len < 8 { "not a token file" } else { "truncated" };
        assert!(error.contains(expected), "{len} bytes: {error}");
    }
    let longer = [&good[..], &[0]].concat();
    assert!(error_of(&dir, &longer).contains("more than its header describes"));
}

/// An invalid header is rejected even if its checksum is correct.
#[test]
fn every_header_field_is_validated() {
    let dir = TestDir::new();
    let good = good(&dir);
    for (at, value, expected) in [
        (8, 3u64, "version 3 is not supported (this program reads 1 to 2)"),
        (12, 3, "invalid header: 3 bytes per token"),
        (20, 257, "end token 257, vocabulary 257"),
        (24, 4, "truncated"),
        (24, 2, "more than its header describes"),
        (24, u64::MAX, "more than"),
        (32, 13, "truncated"),
        (32, 10, "the index has 11 tokens, the header 10"),
        (32, u64::MAX, "more than"),
        (48, 1, "truncated"),
        (96, 0, "document index entries are corrupt"),
        (128, 0, "tokenizer bytes are corrupt"),
        (64, 0, "checksums are corrupt"),
    ] {
        let mut bytes = good.clone();
        let width = if at < 24 { 4 } else { 8 };
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        let digest = *blake3::hash(&bytes[..160]).as_bytes();
        bytes[160..192].copy_from_slice(&digest);
        let error = error_of(&dir, &bytes);
        assert!(error.contains(expected), "field at {at} = {value}: {error}");
    }
}

/// An index that points outside the file is rejected even if all checksums are correct.
#[test]
fn unordered_index_is_rejected() {
    let dir = TestDir::new();
    let mut bytes = good(&dir);
    bytes[216..224].copy_from_slice(&u64::MAX.to_le_bytes());
    let index = *blake3::hash(&bytes[216..264]).as_bytes();
    bytes[96..128].copy_from_slice(&index);
    let digest = *blake3::hash(&bytes[..160]).as_bytes();
    bytes[160..192].copy_from_slice(&digest);
    assert!(error_of(&dir, &bytes).contains("document 1 ends before it starts"));
}

#[test]
fn other_files_are_rejected() {
    let dir = TestDir::new();
    let error =
        examine(&dir.write("a.txt", "just text, and enough of it")).unwrap_err().to_string();
    assert!(error.contains("lockstep data prepare"), "{error}");
    let error = examine(&dir.path("")).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    let error = examine(&dir.path("none")).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
}
