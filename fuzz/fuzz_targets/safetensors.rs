//! Arbitrary bytes as a safetensors file: it is rejected, or its tensors cover its bytes.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lockstep_ckpt::safetensors::File;
use lockstep_fuzz::{folder, timed};

static PATH: LazyLock<PathBuf> =
    LazyLock::new(|| folder("safetensors").join("model.safetensors"));

fuzz_target!(|bytes: &[u8]| {
    fs::write(&*PATH, bytes).expect("written");
    timed(|| {
        let Ok(file) = File::open(&PATH) else { return };
        for name in file.names() {
            let tensor = file.get(name).expect("a listed tensor");
            assert_eq!(tensor.dims.iter().product::<usize>(), tensor.len());
            if tensor.dtype.fits_f32() {
                tensor.read(0, &mut vec![0.0; tensor.len()]);
            }
        }
    });
});
