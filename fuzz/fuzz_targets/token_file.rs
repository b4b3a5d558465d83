//! Arbitrary bytes as a token file, as they are and with valid checksums: it is rejected, or its samples can be read.
//! The same bytes as the text of a shared token.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lockstep_comm::wire::Secret;
use lockstep_data::{Options, SampleId, Source, Split, TokenFile};
use lockstep_fuzz::{folder, sign_tokens, timed};

static PATH: LazyLock<PathBuf> = LazyLock::new(|| folder("token-file").join("file.tokens"));

fuzz_target!(|bytes: &[u8]| {
    let _ = Secret::from_hex(&String::from_utf8_lossy(bytes));
    let mut signed = bytes.to_vec();
    sign_tokens(&mut signed);
    for file in [bytes, &signed] {
        fs::write(&*PATH, file).expect("written");
        timed(read);
    }
});

fn read() {
    let Ok(file) = TokenFile::open(&PATH) else { return };
    let _ = file.check(|_| {});
    for document in 0..file.documents().min(4) {
        let _ = file.read(document, 0, &mut vec![0; file.len_of(document) as usize]);
    }
    for held_out in [0.0, 0.5] {
        let path = PATH.to_str().expect("a plain path");
        let Ok(source) = Source::open(path, &Options { held_out }) else { continue };
        for split in [Split::Train, Split::HeldOut] {
            if source.epoch_tokens(split) == Some(0) {
                continue;
            }
            let id = SampleId { split, seed: 7, batch: 1 << 30, global_batch: 8, index: 3 };
            let mut tokens = [0; 33];
            source.sample(id, &mut tokens);
            assert!(tokens.iter().all(|token| (*token as usize) < source.vocab()));
        }
        source.identity();
    }
}
