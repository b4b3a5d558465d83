//! Corrupt samples are skipped, the same ones for every reader, and no others.

use crate::test_dir::{TestDir, open};
use lockstep_data::{Cause, SampleId, Source, Split, TokenFile};
use std::ops::Range;
use std::path::Path;

const HEADER: usize = 192;
const CHUNK: usize = 16 << 10;
const END: u32 = 256;

/// 120 documents with about 90,000 tokens of two bytes each: eleven chunks.
fn documents() -> Vec<String> {
    (0..120).map(|i| format!("<{i}>").repeat(100 + i * 37 % 150)).collect()
}

/// The same file with bytes changed.
fn damaged(dir: &TestDir, good: &Path, change: impl Fn(&mut [u8])) -> std::path::PathBuf {
    let mut bytes = std::fs::read(good).unwrap();
    change(&mut bytes);
    dir.write("damaged.tokens", bytes)
}

/// Byte range of a sample's tokens.
fn bytes_of(source: &Source, file: &TokenFile, number: u64, seq: usize) -> Vec<Range<usize>> {
    let starts: Vec<u64> = (0..file.documents())
        .scan(0, |end, document| {
            *end += file.len_of(document);
            Some(*end - file.len_of(document))
        })
        .collect();
    let run = |piece: &lockstep_data::Piece| {
        let end = piece.tokens.end.min(file.len_of(piece.document));
        let at = |token: u64| 2 * (starts[piece.document as usize] + token) as usize;
        at(piece.tokens.start)..at(end)
    };
    source
        .pieces(
            SampleId { split: Split::Train, seed: 7, batch: number, global_batch: 1, index: 0 },
            seq,
        )
        .iter()
        .map(run)
        .collect()
}

#[test]
fn corrupt_chunk_skips_only_its_samples() {
    let dir = TestDir::new();
    let path = dir.documents(&documents());
    let file = TokenFile::open(&path).unwrap();
    let good = open(&path, 0.0);
    // One letter becomes another, which only the checksum detects.
    let corrupt = damaged(&dir, &path, |bytes| bytes[HEADER + 3 * CHUNK + 1000] ^= 2);
    let (one, other) = (open(&corrupt, 0.0), open(&corrupt, 0.0));
    let spot = 3 * CHUNK..4 * CHUNK;
    let seq = 512;
    let (mut skipped, mut kept) = (0, 0);
    let numbers: Vec<u64> = (0..400).collect();
    let sample = |source: &Source, number: u64| {
        let mut tokens = vec![0; seq + 1];
        let damage = source.sample(
            SampleId { split: Split::Train, seed: 7, batch: number, global_batch: 1, index: 0 },
            &mut tokens,
        );
        (tokens, damage)
    };
    let backward: Vec<_> = numbers.iter().rev().map(|number| sample(&other, *number)).collect();
    for (number, again) in numbers.iter().zip(backward.into_iter().rev()) {
        let (tokens, damage) = sample(&one, *number);
        assert_eq!((&tokens, &damage), (&again.0, &again.1), "sample {number} by itself");
        let touches = |number: u64| {
            let runs = bytes_of(&good, &file, number, seq);
            runs.iter().any(|run| run.start < spot.end && spot.start < run.end)
        };
        let instead = (*number..).find(|number| !touches(*number)).unwrap();
        assert_eq!(tokens, sample(&good, instead).0, "sample {number}");
        assert_eq!(damage.len() as u64, instead - number);
        let taken = one.pieces(
            SampleId { split: Split::Train, seed: 7, batch: *number, global_batch: 1, index: 0 },
            seq,
        );
        let expected = good.pieces(
            SampleId { split: Split::Train, seed: 7, batch: instead, global_batch: 1, index: 0 },
            seq,
        );
        let places = |pieces: &[lockstep_data::Piece]| -> Vec<_> {
            pieces.iter().map(|piece| (piece.document, piece.tokens.clone())).collect()
        };
        assert_eq!(places(&taken), places(&expected));
        for found in &damage {
            assert_eq!(found.path, corrupt);
            assert_eq!(found.offset as usize, HEADER + spot.start);
            assert_eq!(found.cause, Cause::Checksum { len: CHUNK });
            let error = format!(
                "{}, document {}: bytes 49344 to 65728 are corrupt",
                corrupt.display(),
                found.document
            );
            assert!(found.to_string().starts_with(&error), "{found}");
        }
        if damage.is_empty() { kept += 1 } else { skipped += 1 }
    }
    assert!(skipped > 10 && kept > 300, "{skipped} skipped, {kept} read");
    let error = TokenFile::open(&corrupt).unwrap().check(|_| ()).unwrap_err().to_string();
    assert!(error.contains("1 of 11 chunks, the first at byte 49344"), "{error}");
}

#[test]
fn fully_corrupt_file_gives_end_tokens() {
    let dir = TestDir::new();
    let path = dir.documents(&documents());
    let chunks = std::fs::metadata(&path).unwrap().len() as usize / CHUNK;
    let corrupt = damaged(&dir, &path, |bytes| {
        (0..=chunks).for_each(|chunk| bytes[HEADER + chunk * CHUNK] ^= 1);
    });
    let mut tokens = [0; 65];
    let damage = open(&corrupt, 0.0).sample(
        SampleId { split: Split::Train, seed: 1, batch: 0, global_batch: 1, index: 0 },
        &mut tokens,
    );
    assert_eq!((damage.len(), tokens), (Source::MAX_SKIPPED, [END; 65]));
}

/// A file of version 1, which has one checksum of all tokens instead of one per chunk.
fn of_version_1(bytes: &mut Vec<u8>, tokens: Range<usize>, checksums: usize) {
    bytes.truncate(bytes.len() - checksums);
    bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
    let digest = *blake3::hash(&bytes[tokens]).as_bytes();
    bytes[64..96].copy_from_slice(&digest);
    let digest = *blake3::hash(&bytes[..160]).as_bytes();
    bytes[160..192].copy_from_slice(&digest);
}

#[test]
fn version_1_files_are_checked_against_the_vocabulary() {
    let dir = TestDir::new();
    let path = dir.documents(&["one", "two", "three"]);
    let mut bytes = std::fs::read(&path).unwrap();
    of_version_1(&mut bytes, 192..216, 8);
    let old = dir.write("old.tokens", &bytes);
    TokenFile::open(&old).unwrap().check(|_| ()).unwrap();
    assert_eq!(crate::test_dir::texts(&old), ["one", "two", "three"]);

    bytes[192 + 3 * 2] = b'T';
    let changed = dir.write("changed.tokens", &bytes);
    assert_eq!(crate::test_dir::texts(&changed), ["one", "Two", "three"]);
    let error = TokenFile::open(&changed).unwrap().check(|_| ()).unwrap_err().to_string();
    assert!(error.contains("the tokens are corrupt"), "{error}");

    bytes[192 + 4 * 2 + 1] = 2;
    let broken = dir.write("broken.tokens", &bytes);
    let error = TokenFile::open(&broken).unwrap().read(1, 0, &mut [0; 3]).unwrap_err();
    assert_eq!((error.offset, error.document), (200, 1));
    let token = 512 + u32::from(b'w');
    assert_eq!(error.cause, Cause::Token { token, vocab: 257 });
}
