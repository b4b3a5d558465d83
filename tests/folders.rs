//! Tests of the binary: `lockstep import` and `export` with folders written by transformers, and `lockstep ckpt`.

mod program;

use lockstep_ckpt::safetensors::File;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use program::{empty_directory, output, run_in};

const FIXTURES: [(&str, &str); 4] =
    [("gpt2", "f32"), ("llama", "f32"), ("mixtral", "f32"), ("llama-sharded", "bf16")];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/pytorch").join(name)
}

/// Imports a fixture to a run and exports the run. Returns the exported folder.
fn import_and_export(name: &str, dtype: &str, shard_bytes: &str) -> PathBuf {
    let dir = empty_directory(&format!("folders-{name}-{shard_bytes}"));
    let source = fixture(name);
    let printed = output(&dir, &["import", source.to_str().expect("UTF-8"), "--out", "run"]);
    assert!(printed.contains("parameters to run/checkpoints/step-00000000"), "{printed}");
    let options = ["--dtype", dtype, "--shard-bytes", shard_bytes, "--json"];
    let json = output(&dir, &[&["export", "run", "--to", "out"], options.as_slice()].concat());
    let json: serde_json::Value = serde_json::from_str(&json).expect("one object");
    assert_eq!((json["step"].as_u64(), json["folder"].as_str()), (Some(0), Some("out")));
    dir.join("out")
}

/// Type, shape and bytes of each tensor in a folder.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a folder").flatten() {
        let name = entry.file_name().into_string().expect("UTF-8");
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let file = File::open(&entry.path()).expect("a safetensors file");
            for name in file.names() {
                let tensor = file.get(name).expect("listed");
                let content =
                    (tensor.dtype.name().into(), tensor.dims.to_vec(), tensor.bytes.to_vec());
                all.insert(name.into(), content);
            }
        }
    }
    all
}

#[test]
fn import_and_export_preserve_every_bit() {
    for (name, dtype) in FIXTURES {
        for shard_bytes in ["5000000000", "20000"] {
            let out = import_and_export(name, dtype, shard_bytes);
            assert!(tensors(&out) == tensors(&fixture(name)), "{name} in shards of {shard_bytes}");
        }
    }
}

/// Loads exported folders with transformers and prints how much their logits differ from those of the fixtures.
const COMPARE: &str = "
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for fixture, out in zip(sys.argv[1::2], sys.argv[2::2]):
    expected = load_file(fixture + '/expected.safetensors')
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info
    with torch.no_grad():
        logits = model(expected['ids'].long()).logits
    print('max difference', (logits - expected['logits']).abs().max().item())
";

#[test]
fn transformers_loads_exported_folders() {
    let Some(python) = python() else { return };
    let mut args = vec![PathBuf::from("-c"), COMPARE.into()];
    for (name, dtype) in FIXTURES {
        args.extend([fixture(name), import_and_export(name, dtype, "30000")]);
    }
    let run = Command::new(python).args(args).output().expect("python runs");
    let (printed, error) =
        (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{printed}{error}");
    let differences: Vec<f32> = printed
        .lines()
        .filter_map(|line| line.strip_prefix("max difference ")?.parse().ok())
        .collect();
    // The weights are the same; another attention implementation may round differently.
    let close = differences.iter().all(|difference| *difference < 1e-4);
    assert!(differences.len() == FIXTURES.len() && close, "{printed}");
}

/// A Python with transformers: `LOCKSTEP_TEST_PYTHON`, the environment in bench/peers, or python3.
fn python() -> Option<PathBuf> {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/peers/.venv/bin/python");
    let named = std::env::var_os("LOCKSTEP_TEST_PYTHON").map(PathBuf::from);
    let has_transformers = |python: &PathBuf| {
        let run =
            Command::new(python).args(["-c", "import torch, transformers, safetensors"]).output();
        run.is_ok_and(|run| run.status.success())
    };
    let found = named.into_iter().chain([peers, "python3".into()]).find(has_transformers);
    if found.is_none() {
        println!("skipped: no Python with torch and transformers; run scripts/install-peers.sh");
    }
    found
}

#[test]
fn errors_suggest_a_fix() {
    let dir = empty_directory("folders-errors");
    let llama = fixture("llama");
    let llama = llama.to_str().expect("UTF-8");
    output(&dir, &["import", llama, "--out", "run"]);
    output(&dir, &["export", "run/checkpoints/step-00000000", "--to", "out"]);
    for (args, part) in [
        (vec!["import", "nowhere", "--out", "other"], "nowhere/config.json"),
        (
            vec!["import", llama, "--out", "run"],
            "already exists; remove it or choose another folder",
        ),
        (vec!["export", "nowhere", "--to", "other"], "pass a run folder or a checkpoint folder"),
        (vec!["export", "run", "--to", "out"], "already exists"),
        (vec!["export", "run", "--to", "other", "--dtype", "f8"], "possible values: f32, bf16"),
    ] {
        let run = run_in(&dir, &args);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && error.contains(part), "{args:?}: {error}");
    }
    assert!(!dir.join("other").exists(), "a failed export leaves no folder");
}

#[test]
fn checkpoints_are_listed_inspected_checked_and_compared() {
    let dir = empty_directory("folders-ckpt");
    let text = "name = \"small\"\n[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 6\nglobal_batch = 4\n\
                micro_batch = 2\nthreads = 1\n[checkpoint]\nevery = 2\nkeep = 0\n";
    fs::write(dir.join("small.toml"), text).expect("written");
    let printed = output(&dir, &["train", "small.toml", "--engine", "threads", "--ranks", "2"]);
    assert!(printed.contains("saved runs/small/checkpoints/step-00000004 | "), "{printed}");
    assert!(printed.contains("| stalled "), "{printed}");

    let listed = output(&dir, &["ckpt", "list", "runs/small", "--json"]);
    let lines: Vec<serde_json::Value> =
        listed.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let steps: Vec<_> = lines.iter().map(|line| line["step"].as_u64().expect("a step")).collect();
    assert_eq!(steps, [6, 4, 2]);
    assert!(lines.iter().all(|line| line["ok"] == true && line["files"] == 2), "{listed}");
    assert!(output(&dir, &["ckpt", "list", "runs/small"]).contains("step-00000004 "));

    let args = ["ckpt", "inspect", "runs/small", "--tensor", "layers.0.mlp.down.weight"];
    let printed = output(&dir, &args);
    for part in
        ["step           6", "data=2", "24 samples", "param layers.0.mlp.down.weight", "at byte"]
    {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let json = output(&dir, &["ckpt", "inspect", "runs/small", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("one object");
    assert_eq!((json["step"].as_u64(), json["plan"]["ranks"].as_u64()), (Some(6), Some(2)));

    assert!(output(&dir, &["ckpt", "check", "runs/small"]).matches("  ok").count() == 3);
    assert!(output(&dir, &["ckpt", "diff", "runs/small", "runs/small"]).contains("identical"));
    let other = ["ckpt", "diff", "runs/small", "runs/small/checkpoints/step-00000002", "--json"];
    let run = run_in(&dir, &other);
    let json: serde_json::Value = serde_json::from_slice(&run.stdout).expect("one object");
    assert!(!run.status.success() && json["same"] == false, "{json}");
    assert_eq!(json["steps"], serde_json::json!([6, 2]));
    assert!(json["first"][0]["max_abs"].as_f64().expect("a number") > 0.0, "{json}");

    // Exports of an existing and of a missing step.
    let json = output(&dir, &["export", "runs/small", "--step", "4", "--to", "out", "--json"]);
    assert!(json.contains("\"step\":4"), "{json}");
    let run = run_in(&dir, &["export", "runs/small", "--step", "5", "--to", "other"]);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && error.contains("existing steps: 6, 4, 2"), "{error}");

    // After a bit flip, `check` names the file, and a resumed run reports that it uses the previous checkpoint.
    let path = dir.join("runs/small/checkpoints/step-00000006/rank-00001.safetensors");
    let mut bytes = fs::read(&path).expect("rank 1's file");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).expect("written");
    let run = run_in(&dir, &["ckpt", "check", "runs/small"]);
    let printed = String::from_utf8_lossy(&run.stdout);
    assert!(
        !run.status.success() && printed.contains("rank-00001.safetensors is corrupt at byte 0"),
        "{printed}"
    );
    let args = ["train", "small.toml", "--engine", "threads", "--ranks", "1", "--resume"];
    let run = run_in(&dir, &args);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && error.contains("skipped"), "{error}");
    assert!(output(&dir, &["ckpt", "check", "runs/small"]).contains("step-00000006  ok"));
}
