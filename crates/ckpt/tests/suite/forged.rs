//! Forged metadata: manifests with a valid checksum and absurd contents, and pipes instead of files.

use crate::state::{head, holds, save_by};
use crate::support::fresh;
use lockstep_ckpt::{Checkpoint, Disk, Keep, Result, TensorKind, Tensors, load};
use lockstep_plan::Mesh;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// A checkpoint that one rank has written.
fn saved(run: &Path, step: u64) -> PathBuf {
    let keep = Keep { newest: 0, every: 0 };
    save_by(&Disk::default(), run, &Mesh::ONE, &head(step, 0), keep).expect("saved")
}

fn manifest(dir: &Path) -> Value {
    let text = fs::read(dir.join("manifest.json")).expect("a manifest");
    let mut value: Value = serde_json::from_slice(&text).expect("JSON");
    value.as_object_mut().expect("an object").remove("blake3");
    value
}

/// Replaces the manifest of a checkpoint, with a valid checksum, and loads it.
fn load_forged(dir: &Path, manifest: &Value) -> Result<Checkpoint> {
    let body = format!("{}\n", &manifest.to_string()[1..]);
    let sum = blake3::hash(body.as_bytes()).to_hex();
    fs::write(dir.join("manifest.json"), format!("{{\"blake3\":\"{sum}\",\n{body}"))
        .expect("written");
    load(dir)
}

/// Splits the first tensor, which has one piece, into two halves.
fn halves(manifest: &mut Value, second: u64) {
    let tensor = &mut manifest["tensors"][0];
    let elements = tensor["pieces"][0]["runs"][0][1].as_u64().expect("a length");
    let (half, at) = (elements / 2, tensor["pieces"][0]["at"].as_u64().expect("an offset"));
    let piece = |start: u64, at: u64| json!({"file": 0, "at": at, "runs": [[start, half, 0, 1]]});
    tensor["pieces"] = json!([piece(0, at), piece(second.min(half), at + 4 * half)]);
}

#[test]
fn pieces_that_overlap_and_leave_a_gap_are_rejected() {
    let dir = saved(&fresh("forged-pieces"), 1);
    let whole = manifest(&dir);
    let mut complete = whole.clone();
    halves(&mut complete, u64::MAX);
    holds(&load_forged(&dir, &complete).unwrap(), 1);
    for second in [0, 1] {
        let mut forged = whole.clone();
        halves(&mut forged, second);
        let error = load_forged(&dir, &forged).err().expect("rejected").to_string();
        assert!(error.contains("the pieces of param embed.tokens overlap"), "{error}");
    }
}

#[test]
fn absurd_numbers_are_rejected() {
    let dir = saved(&fresh("forged-numbers"), 1);
    let whole = manifest(&dir);
    let huge = json!(u64::MAX);
    for (path, value, says) in [
        ("/tensors/0/pieces/0/at", huge.clone(), "is stored at byte 18446744073709551615"),
        ("/tensors/0/pieces/0/file", json!(7), "refers to file 7, which is not listed"),
        ("/tensors/0/pieces/0/runs/0/0", huge.clone(), "does not fit its shape"),
        ("/tensors/0/pieces/0/runs/0/1", json!(1), "contain 1 of"),
        ("/tensors/0/pieces/0/runs/0/3", huge.clone(), "does not fit its shape"),
        ("/tensors/0/dims/0", huge.clone(), "has shape"),
        ("/tensors/0/name", json!("layers.0.norm1.gain"), "is listed twice"),
        ("/tensors/1/pieces/0/at", whole["tensors"][0]["pieces"][0]["at"].clone(), "belongs to"),
        ("/shape/layers", json!(2_000_000), "the model has about 3.2e7 tensors"),
        ("/shape/layers", huge.clone(), "layers must be at most 1000000000"),
        ("/shape/heads", json!(0), "heads must be a positive integer"),
        ("/shape/dim", huge.clone(), "dim must be at most"),
        ("/step", huge.clone(), "step 18446744073709551615 is larger"),
        ("/chunk_bytes", json!(0), "chunk_bytes must be 1 to"),
        ("/chunk_bytes", huge.clone(), "chunk_bytes must be 1 to"),
        ("/files/0/bytes", huge.clone(), "do not add up"),
        ("/files/0/name", json!("../rank-00000.safetensors"), "is not a file name"),
    ] {
        let mut forged = whole.clone();
        *forged.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value.clone();
        let error = load_forged(&dir, &forged).err().unwrap_or_else(|| panic!("{path} = {value}"));
        assert!(error.to_string().contains(says), "{path} = {value}: {error}");
    }
}

/// Every number of a manifest, with its path.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.into()),
        Value::Array(items) => (items.iter().enumerate())
            .for_each(|(at, item)| numbers(item, &format!("{path}/{at}"), found)),
        Value::Object(items) => {
            items.iter().for_each(|(key, item)| numbers(item, &format!("{path}/{key}"), found))
        }
        _ => {}
    }
}

#[test]
fn any_number_of_a_manifest_may_be_wrong() {
    let dir = saved(&fresh("forged-any"), 1);
    let whole = manifest(&dir);
    let mut paths = Vec::new();
    numbers(&whole, "", &mut paths);
    // All tensors have the same fields.
    paths.retain(|path| !path.starts_with("/tensors") || path.starts_with("/tensors/1/"));
    assert!(paths.len() > 20, "{paths:?}");
    for path in paths {
        for value in [json!(0), json!(1), json!(4097), json!(i64::MAX), json!(u64::MAX)] {
            let mut forged = whole.clone();
            *forged.pointer_mut(&path).expect("a number") = value;
            let Ok(checkpoint) = load_forged(&dir, &forged) else { continue };
            let params = checkpoint.params();
            for named in params.list() {
                let _ = params.read(&named.name, &mut vec![0.0; named.len()]);
            }
            checkpoint.check(|_| {});
        }
    }
}

fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: the name is a C string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

#[test]
fn pipes_instead_of_files_are_rejected() {
    let run = fresh("forged-pipes");
    let dir = saved(&run, 1);
    pipe(&dir.join("rank-00000.safetensors"));
    assert!(load(&dir).is_err());
    pipe(&dir.join("manifest.json"));
    let error = load(&dir).err().expect("rejected").to_string();
    assert!(error.contains("manifest.json: not a regular file"), "{error}");
    pipe(&run.join("generation"));
    let error = lockstep_ckpt::newest(&run).unwrap_err().to_string();
    assert!(error.contains("generation: not a regular file"), "{error}");
    pipe(&run.join("config.json"));
    let error = lockstep_ckpt::hf::Source::open(&run).err().expect("rejected").to_string();
    assert!(error.contains("config.json: not a regular file"), "{error}");
}

#[test]
fn residuals_of_unknown_tensors_are_rejected() {
    let dir = saved(&fresh("forged-residuals"), 1);
    let mut forged = manifest(&dir);
    let mut residual = forged["tensors"][0].clone();
    residual["kind"] = json!(TensorKind::Residual.name());
    residual["name"] = json!("unknown");
    forged["tensors"].as_array_mut().expect("a list").push(residual);
    let error = load_forged(&dir, &forged).err().expect("rejected").to_string();
    assert!(error.contains("residual: unknown"), "{error}");
}
