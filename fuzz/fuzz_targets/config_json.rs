//! Arbitrary bytes as the `config.json` of a Hugging Face folder: it is rejected, or every tensor can be read.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lockstep_ckpt::Tensors;
use lockstep_ckpt::hf::Source;
use lockstep_fuzz::{folder, timed};

/// A folder with the weights of a small Llama.
static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = folder("config-json");
    let weights = include_bytes!("../../fixtures/pytorch/llama/model.safetensors");
    fs::write(dir.join("model.safetensors"), weights).expect("written");
    dir
});

fuzz_target!(|bytes: &[u8]| {
    fs::write(DIR.join("config.json"), bytes).expect("written");
    timed(|| {
        let Ok(source) = Source::open(&DIR) else { return };
        for named in source.list() {
            source.read(&named.name, &mut vec![0.0; named.len()]).expect("an open folder is valid");
        }
    });
});
