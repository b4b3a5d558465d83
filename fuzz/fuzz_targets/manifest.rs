//! Arbitrary bytes as the manifest of a checkpoint, with a valid checksum: it is rejected, or every tensor can be read
//! or fails with an error.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lockstep_ckpt::{Tensors, load};
use lockstep_fuzz::{folder, manifest, timed};

/// A checkpoint folder with a file of the size that the seed describes.
static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = folder("manifest");
    fs::write(dir.join("rank-00000.safetensors"), vec![0; 1 << 16]).expect("written");
    dir
});

fuzz_target!(|bytes: &[u8]| {
    fs::write(DIR.join("manifest.json"), manifest(bytes)).expect("written");
    timed(|| {
        let Ok(checkpoint) = load(&DIR) else { return };
        let params = checkpoint.params();
        for named in params.list() {
            let _ = params.read(&named.name, &mut vec![0.0; named.len()]);
        }
        checkpoint.check(|_| {});
    });
});
