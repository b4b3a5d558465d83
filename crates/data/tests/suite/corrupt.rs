//! Samples whose tokens were damaged are left out: the same ones for everybody, and no others.

use crate::desk::{Desk, open};
use lockstep_data::{Cause, Source, Split, TokenFile};
use std::ops::Range;
use std::path::Path;

const HEADER: usize = 192;
const CHUNK: usize = 16 << 10;
const END: u32 = 256;

/// 120 documents of bytes, some 90,000 tokens of two bytes each: eleven chunks.
fn documents() -> Vec<String> {
    (0..120).map(|i| format!("<{i}>").repeat(100 + i * 37 % 150)).collect()
}

/// The same file with bytes changed.
fn damaged(desk: &Desk, good: &Path, change: impl Fn(&mut [u8])) -> std::path::PathBuf {
    let mut bytes = std::fs::read(good).unwrap();
    change(&mut bytes);
    desk.write("damaged.tokens", bytes)
}

/// The bytes of tokens that a sample is made of.
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
    source.pieces(Split::Train, 7, number, 1, 0, seq).iter().map(run).collect()
}

#[test]
fn a_rotten_spot_costs_the_samples_that_touch_it() {
    let desk = Desk::new();
    let path = desk.documents(&documents());
    let file = TokenFile::open(&path).unwrap();
    let good = open(&path, 0.0);
    // A letter that becomes another one: only the checksum tells.
    let rotten = damaged(&desk, &path, |bytes| bytes[HEADER + 3 * CHUNK + 1000] ^= 2);
    let (one, other) = (open(&rotten, 0.0), open(&rotten, 0.0));
    let spot = 3 * CHUNK..4 * CHUNK;
    let seq = 512;
    let (mut left_out, mut kept) = (0, 0);
    let numbers: Vec<u64> = (0..400).collect();
    let sample = |source: &Source, number: u64| {
        let mut tokens = vec![0; seq + 1];
        let damage = source.sample(Split::Train, 7, number, 1, 0, &mut tokens);
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
        let taken = one.pieces(Split::Train, 7, *number, 1, 0, seq);
        let expected = good.pieces(Split::Train, 7, instead, 1, 0, seq);
        let places = |pieces: &[lockstep_data::Piece]| -> Vec<_> {
            pieces.iter().map(|piece| (piece.document, piece.tokens.clone())).collect()
        };
        assert_eq!(places(&taken), places(&expected));
        for found in &damage {
            assert_eq!(found.path, rotten);
            assert_eq!(found.offset as usize, HEADER + spot.start);
            assert_eq!(found.cause, Cause::Checksum { len: CHUNK });
            let told = format!(
                "{}, document {}: bytes 49344 to 65728 are not what was written",
                rotten.display(),
                found.document
            );
            assert!(found.to_string().starts_with(&told), "{found}");
        }
        if damage.is_empty() { kept += 1 } else { left_out += 1 }
    }
    assert!(left_out > 10 && kept > 300, "{left_out} left out, {kept} kept");
    let told = TokenFile::open(&rotten).unwrap().check(|_| ()).unwrap_err().to_string();
    assert!(told.contains("1 of 11 chunks, the first at byte 49344"), "{told}");
}

#[test]
fn a_file_that_is_all_rotten_gives_nothing_but_ends() {
    let desk = Desk::new();
    let path = desk.documents(&documents());
    let chunks = std::fs::metadata(&path).unwrap().len() as usize / CHUNK;
    let rotten = damaged(&desk, &path, |bytes| {
        (0..=chunks).for_each(|chunk| bytes[HEADER + chunk * CHUNK] ^= 1);
    });
    let mut tokens = [0; 65];
    let damage = open(&rotten, 0.0).sample(Split::Train, 1, 0, 1, 0, &mut tokens);
    assert_eq!((damage.len(), tokens), (Source::PATIENCE, [END; 65]));
}

/// A file as version 1 wrote it: no checksums of chunks, one of all tokens.
fn of_version_1(bytes: &mut Vec<u8>, tokens: Range<usize>, checksums: usize) {
    bytes.truncate(bytes.len() - checksums);
    bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
    let digest = *blake3::hash(&bytes[tokens]).as_bytes();
    bytes[64..96].copy_from_slice(&digest);
    let digest = *blake3::hash(&bytes[..160]).as_bytes();
    bytes[160..192].copy_from_slice(&digest);
}

#[test]
fn files_of_version_1_are_read_and_held_to_their_vocabulary() {
    let desk = Desk::new();
    let path = desk.documents(&["one", "two", "three"]);
    let mut bytes = std::fs::read(&path).unwrap();
    of_version_1(&mut bytes, 192..216, 8);
    let old = desk.write("old.tokens", &bytes);
    TokenFile::open(&old).unwrap().check(|_| ()).unwrap();
    assert_eq!(crate::desk::texts(&old), ["one", "two", "three"]);

    bytes[192 + 3 * 2] = b'T';
    let changed = desk.write("changed.tokens", &bytes);
    assert_eq!(crate::desk::texts(&changed), ["one", "Two", "three"]);
    let told = TokenFile::open(&changed).unwrap().check(|_| ()).unwrap_err().to_string();
    assert!(told.contains("the tokens changed"), "{told}");

    bytes[192 + 4 * 2 + 1] = 2;
    let broken = desk.write("broken.tokens", &bytes);
    let told = TokenFile::open(&broken).unwrap().read(1, 0, &mut [0; 3]).unwrap_err();
    assert_eq!((told.offset, told.document), (200, 1));
    let token = 512 + u32::from(b'w');
    assert_eq!(told.cause, Cause::Token { token, vocab: 257 });
}
