//! Files that were cut, changed, or are something else: each is told apart from a good one.

use crate::desk::Desk;
use lockstep_data::{Error, TokenFile};
use std::path::Path;

/// Opens the file and reads all of it.
fn examine(path: &Path) -> Result<(), Error> {
    TokenFile::open(path)?.check(|_| ())
}

/// A file of 3 documents and 11 tokens: header to 192, tokens to 216, index to 264, one checksum.
fn good(desk: &Desk) -> Vec<u8> {
    let path = desk.documents(&["one", "two", "three"]);
    examine(&path).unwrap();
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes.len(), 192 + 24 + 48 + 8);
    bytes
}

fn told(desk: &Desk, bytes: &[u8]) -> String {
    examine(&desk.write("damaged.tokens", bytes)).expect_err("this file is damaged").to_string()
}

#[test]
fn every_changed_byte_is_found() {
    let desk = Desk::new();
    let good = good(&desk);
    for at in 0..good.len() {
        for change in [1, 0x80] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            let told = told(&desk, &bytes);
            let expected = match at {
                0..8 => "not a token file",
                8..12 => "version",
                12..192 => "header was changed",
                192..216 => "the tokens changed",
                216..264 => "the index of documents changed",
                _ => "the checksums changed",
            };
            assert!(told.contains(expected), "byte {at}: {told}");
        }
    }
}

#[test]
fn every_cut_is_found() {
    let desk = Desk::new();
    let good = good(&desk);
    for len in 0..good.len() {
        let told = told(&desk, &good[..len]);
        let expected = if len < 8 { "not a token file" } else { "cut short" };
        assert!(told.contains(expected), "{len} bytes: {told}");
    }
    let longer = [&good[..], &[0]].concat();
    assert!(told(&desk, &longer).contains("more than the header speaks of"));
}

/// A header that makes no sense is refused even when its checksum is right.
#[test]
fn every_field_is_looked_at() {
    let desk = Desk::new();
    let good = good(&desk);
    for (at, value, expected) in [
        (8, 3u64, "version 3, and this program reads versions 1 to 2"),
        (12, 3, "makes no sense: 3 bytes per token"),
        (20, 257, "end token 257 of 257"),
        (24, 4, "cut short"),
        (24, 2, "more than the header speaks of"),
        (24, u64::MAX, "more than"),
        (32, 13, "cut short"),
        (32, 10, "11 tokens by the index, not 10"),
        (32, u64::MAX, "more than"),
        (48, 1, "cut short"),
        (96, 0, "index of documents changed"),
        (128, 0, "tokenizer changed"),
        (64, 0, "checksums changed"),
    ] {
        let mut bytes = good.clone();
        let width = if at < 24 { 4 } else { 8 };
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        let digest = *blake3::hash(&bytes[..160]).as_bytes();
        bytes[160..192].copy_from_slice(&digest);
        let told = told(&desk, &bytes);
        assert!(told.contains(expected), "field at {at} = {value}: {told}");
    }
}

/// An index that points outside the file is refused even when all checksums are right.
#[test]
fn an_index_out_of_order_is_refused() {
    let desk = Desk::new();
    let mut bytes = good(&desk);
    bytes[216..224].copy_from_slice(&u64::MAX.to_le_bytes());
    let index = *blake3::hash(&bytes[216..264]).as_bytes();
    bytes[96..128].copy_from_slice(&index);
    let digest = *blake3::hash(&bytes[..160]).as_bytes();
    bytes[160..192].copy_from_slice(&digest);
    assert!(told(&desk, &bytes).contains("document 1 ends before it starts"));
}

#[test]
fn what_is_no_token_file_is_told() {
    let desk = Desk::new();
    let error =
        examine(&desk.write("a.txt", "just text, and enough of it")).unwrap_err().to_string();
    assert!(error.contains("lockstep data prepare"), "{error}");
    let error = examine(&desk.path("")).unwrap_err().to_string();
    assert!(error.contains("no file at all"), "{error}");
    let error = examine(&desk.path("none")).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
}
