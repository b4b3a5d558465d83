//! Exported folders equal those written by transformers.

use crate::support::{FIXTURES, fixture, fresh, same, weights};
use lockstep_ckpt::hf::{Export, Source, export};
use lockstep_ckpt::safetensors::Dtype;
use lockstep_ckpt::{Error, Tensors};
use lockstep_plan::model::{Moe, Shape};
use std::fs;

#[test]
fn exported_tensors_equal_imported_ones() {
    for name in FIXTURES {
        let source = Source::open(&fixture(name)).unwrap();
        // Fixtures are smaller than 300 KB. The limits give one file, a few files, and one per tensor.
        for (shard_bytes, files) in [(1 << 20, 1..=1), (60_000, 2..=5), (1, 20..=50)] {
            let to = fresh(&format!("export-{name}"));
            export(source.shape(), &source, &to, &Export { shard_bytes, ..Export::default() })
                .unwrap();
            assert_eq!(weights(&to), weights(&fixture(name)), "{name}");
            let count = fs::read_dir(&to).unwrap().flatten();
            let count =
                count.filter(|f| f.file_name().to_str().unwrap().ends_with(".safetensors")).count();
            assert!(files.contains(&count), "{name}: {count} files of {shard_bytes}");
            let again = Source::open(&to).unwrap();
            assert_eq!(again.shape(), source.shape());
            same(&again, &source);
        }
    }
}

#[test]
fn bf16_keeps_what_was_bf16_and_rounds_the_rest() {
    let source = Source::open(&fixture("llama-sharded")).unwrap();
    let to = fresh("export-bf16");
    let bf16 = Export { dtype: Dtype::Bf16, ..Export::default() };
    export(source.shape(), &source, &to, &bf16).unwrap();
    assert_eq!(weights(&to), weights(&fixture("llama-sharded")));
    let config = fs::read_to_string(to.join("config.json")).unwrap();
    assert!(config.contains("\"dtype\": \"bfloat16\""), "{config}");

    let source = Source::open(&fixture("llama")).unwrap();
    let to = fresh("export-rounded");
    export(source.shape(), &source, &to, &bf16).unwrap();
    for (name, (_, rounded)) in weights(&to) {
        let (_, exact) = &weights(&fixture("llama"))[&name];
        for (rounded, exact) in rounded.iter().zip(exact) {
            assert!((rounded - exact).abs() <= exact.abs() / 256.0, "{name}: {exact} as {rounded}");
        }
    }
}

#[test]
fn unsupported_shapes_are_rejected_without_output() {
    type Change = fn(&mut Shape);
    let cases: [(&str, Change, &str); 7] = [
        ("gpt2", |s| s.kv_heads = 2, "kv_heads=2 must equal heads=4"),
        ("gpt2", |s| s.head_dim = 16, "must equal dim=32"),
        ("llama", |s| s.heads = 5, "must divide dim=32"),
        ("mixtral", |s| s.moe = None, "use family=llama"),
        ("mixtral", |s| s.moe = s.moe.map(|m| Moe { capacity: Some(1.25), ..m }), "capacity=1.25"),
        ("mixtral", |s| s.moe = s.moe.map(|m| Moe { shared: 2, ..m }), "shared_experts=2"),
        ("llama", |s| s.layers = 3, "layers.2.norm1.gain [32] is missing"),
    ];
    for (name, change, says) in cases {
        let source = Source::open(&fixture(name)).unwrap();
        let mut shape = source.shape().clone();
        change(&mut shape);
        let to = fresh("export-refused").join("model");
        let error = export(&shape, &source, &to, &Export::default()).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert!(!to.exists() && !to.parent().unwrap().exists());
    }
}

#[test]
fn export_never_overwrites() {
    let source = Source::open(&fixture("llama")).unwrap();
    let to = fresh("export-there");
    fs::create_dir_all(&to).unwrap();
    let error = export(source.shape(), &source, &to, &Export::default()).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    assert!(source.list().len() > 10);
}
