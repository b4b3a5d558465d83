//! Every bit flip in a checkpoint is detected and the file named.

use crate::state::{saved, wrong_with};
use crate::support::fresh;
use lockstep_ckpt::{Error, Runs, load, params_of};
use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;

const FLIPS: u64 = 10_000;

/// Files of a checkpoint with their bytes.
fn files(dir: &PathBuf) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(dir).unwrap().flatten();
    let mut files: Vec<_> = entries.map(|e| (e.path(), fs::read(e.path()).unwrap())).collect();
    files.sort();
    files
}

fn put(path: &PathBuf, at: usize, byte: u8) {
    let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(at as u64)).unwrap();
    file.write_all(&[byte]).unwrap();
}

#[test]
fn every_bit_flip_is_detected_and_located() {
    let dir = saved(&fresh("flips"), 5);
    let files = files(&dir);
    assert_eq!(files.len(), 5, "four ranks' files and the manifest");
    let total: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    let (mut state, mut hit) = (1u64, vec![0; files.len()]);
    for flip in 0..FLIPS {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bit = ((u128::from(state) * (8 * total) as u128) >> 64) as usize;
        let mut at = bit / 8;
        let number = files.iter().position(|(_, bytes)| {
            let here = at < bytes.len();
            at -= if here { 0 } else { bytes.len() };
            here
        });
        let number = number.unwrap();
        let (path, bytes) = &files[number];
        put(path, at, bytes[at] ^ 1 << (bit % 8));
        let wrong = wrong_with(&dir);
        put(path, at, bytes[at]);
        let [error] = &wrong[..] else { panic!("flip {flip}, byte {at} of {path:?}: {wrong:?}") };
        assert_eq!(error.path(), path, "{error}");
        let Error::Corrupt { offset, .. } = error else { panic!("{error}") };
        assert!((*offset as usize) <= at, "byte {at}: {error}");
        hit[number] += 1;
    }
    assert!(wrong_with(&dir).is_empty(), "all were put back");
    assert!(hit.iter().all(|hit| *hit > 100), "{hit:?}");
}

/// Reading a slice reports a flip in its chunks and no other.
#[test]
fn readers_detect_flips_only_in_chunks_they_read() {
    let dir = saved(&fresh("flips-read"), 5);
    let (path, bytes) = files(&dir).remove(1);
    let at = bytes.len() - 3;
    put(&path, at, bytes[at] ^ 4);
    let checkpoint = load(&dir).unwrap();
    let (mut good, mut bad) = (0, 0);
    for named in params_of(&checkpoint.head().shape) {
        let mut out = vec![0.0; named.len()];
        for kind in crate::state::KINDS {
            match checkpoint.read(kind, &named.name, &[Runs::one(0..named.len())], &mut out) {
                Ok(()) => good += 1,
                Err(Error::Corrupt { path: named, offset, .. }) => {
                    assert_eq!(named, path);
                    assert_eq!(offset as usize, at / 1000 * 1000);
                    bad += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(bad >= 1 && good > 10 * bad, "{good} good, {bad} bad");
}

#[test]
fn missing_and_truncated_files_are_named() {
    let dir = saved(&fresh("cut"), 5);
    for (path, bytes) in files(&dir) {
        for length in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&path, &bytes[..length]).unwrap();
            let wrong = wrong_with(&dir);
            assert_eq!(wrong[0].path(), path, "{wrong:?}");
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(wrong_with(&dir)[0].path(), path);
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        assert_eq!(wrong_with(&dir)[0].path(), path);
        fs::write(&path, bytes).unwrap();
        assert!(wrong_with(&dir).is_empty());
    }
}
