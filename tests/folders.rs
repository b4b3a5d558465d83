//! `lockstep import` and `lockstep export` as their users run them, on folders that transformers wrote, and
//! transformers on what comes out.

use lockstep_ckpt::safetensors::File;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const FIXTURES: [(&str, &str); 4] =
    [("gpt2", "f32"), ("llama", "f32"), ("mixtral", "f32"), ("llama-sharded", "bf16")];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/pytorch").join(name)
}

/// A folder of its own for a test, empty.
fn fresh(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target folder can be written");
    dir
}

fn lockstep(dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    command.args(words).current_dir(dir).output().expect("the binary runs")
}

#[track_caller]
fn done(dir: &Path, words: &[&str]) -> String {
    let run = lockstep(dir, words);
    assert!(run.status.success(), "{words:?}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).expect("text")
}

/// The fixture, through a run, as `out` in a folder of its own; returns that.
fn through_a_run(name: &str, dtype: &str, shard_bytes: &str) -> PathBuf {
    let dir = fresh(&format!("folders-{name}-{shard_bytes}"));
    let source = fixture(name);
    let said = done(&dir, &["import", source.to_str().expect("UTF-8"), "--out", "run"]);
    assert!(said.contains("parameters in run/checkpoints/step-00000000"), "{said}");
    let options = ["--dtype", dtype, "--shard-bytes", shard_bytes, "--json"];
    let said = done(&dir, &[&["export", "run", "--to", "out"], options.as_slice()].concat());
    let said: serde_json::Value = serde_json::from_str(&said).expect("one object");
    assert_eq!((said["step"].as_u64(), said["folder"].as_str()), (Some(0), Some("out")));
    dir.join("out")
}

/// Types, shapes and bytes by name, over all files of a folder.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a folder").flatten() {
        let name = entry.file_name().into_string().expect("UTF-8");
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let file = File::open(&entry.path()).expect("a safetensors file");
            for name in file.names() {
                let tensor = file.get(name).expect("listed");
                let whole =
                    (tensor.dtype.name().into(), tensor.dims.to_vec(), tensor.bytes.to_vec());
                all.insert(name.into(), whole);
            }
        }
    }
    all
}

#[test]
fn a_model_comes_out_bit_for_bit_as_it_came_in() {
    for (name, dtype) in FIXTURES {
        for shard_bytes in ["5000000000", "20000"] {
            let out = through_a_run(name, dtype, shard_bytes);
            assert!(tensors(&out) == tensors(&fixture(name)), "{name} in shards of {shard_bytes}");
        }
    }
}

/// Loads the folder as any user would, and prints how far its logits are from those that the fixture's own
/// folder gave.
const COMPARE: &str = "
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for fixture, out in zip(sys.argv[1::2], sys.argv[2::2]):
    expected = load_file(fixture + '/expected.safetensors')
    model, told = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(told[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), told
    with torch.no_grad():
        logits = model(expected['ids'].long()).logits
    print('off by', (logits - expected['logits']).abs().max().item())
";

#[test]
fn transformers_loads_what_we_export() {
    let Some(python) = python() else { return };
    let mut words = vec![PathBuf::from("-c"), COMPARE.into()];
    for (name, dtype) in FIXTURES {
        words.extend([fixture(name), through_a_run(name, dtype, "30000")]);
    }
    let run = Command::new(python).args(words).output().expect("python runs");
    let (said, error) =
        (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{said}{error}");
    let off: Vec<f32> =
        said.lines().filter_map(|line| line.strip_prefix("off by ")?.parse().ok()).collect();
    // The same weights by the same program; another way of attention may round otherwise.
    assert!(off.len() == FIXTURES.len() && off.iter().all(|off| *off < 1e-4), "{said}");
}

/// A Python that has transformers: `LOCKSTEP_TEST_PYTHON`, the peers' environment, or the system's.
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
fn mistakes_are_told_with_the_way_out() {
    let dir = fresh("folders-mistakes");
    let llama = fixture("llama");
    let llama = llama.to_str().expect("UTF-8");
    done(&dir, &["import", llama, "--out", "run"]);
    done(&dir, &["export", "run/checkpoints/step-00000000", "--to", "out"]);
    for (words, hint) in [
        (vec!["import", "nowhere", "--out", "other"], "nowhere/config.json"),
        (
            vec!["import", llama, "--out", "run"],
            "already exists; remove it or choose another folder",
        ),
        (vec!["export", "nowhere", "--to", "other"], "name a run folder or one of its checkpoints"),
        (vec!["export", "run", "--to", "out"], "already exists"),
        (vec!["export", "run", "--to", "other", "--dtype", "f8"], "possible values: f32, bf16"),
    ] {
        let run = lockstep(&dir, &words);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && error.contains(hint), "{words:?}: {error}");
    }
    assert!(!dir.join("other").exists(), "nothing is left of what failed");
}

/// What people ask of checkpoints.
#[test]
fn checkpoints_are_listed_inspected_checked_and_compared() {
    let dir = fresh("folders-ckpt");
    let text = "name = \"small\"\n[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 6\nglobal_batch = 4\n\
                micro_batch = 2\nthreads = 1\n[checkpoint]\nevery = 2\nkeep = 0\n";
    fs::write(dir.join("small.toml"), text).expect("written");
    let said = done(&dir, &["train", "small.toml", "--engine", "threads", "--ranks", "2"]);
    assert!(said.contains("saved runs/small/checkpoints/step-00000004 | "), "{said}");
    assert!(said.contains("| stalled "), "{said}");

    let listed = done(&dir, &["ckpt", "list", "runs/small", "--json"]);
    let lines: Vec<serde_json::Value> =
        listed.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let steps: Vec<_> = lines.iter().map(|line| line["step"].as_u64().expect("a step")).collect();
    assert_eq!(steps, [6, 4, 2]);
    assert!(lines.iter().all(|line| line["ok"] == true && line["files"] == 2), "{listed}");
    assert!(done(&dir, &["ckpt", "list", "runs/small"]).contains("step-00000004 "));

    let words = ["ckpt", "inspect", "runs/small", "--tensor", "layers.0.mlp.down.weight"];
    let said = done(&dir, &words);
    for part in
        ["step           6", "data=2", "24 samples", "param layers.0.mlp.down.weight", "at byte"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let said = done(&dir, &["ckpt", "inspect", "runs/small", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).expect("one object");
    assert_eq!((said["step"].as_u64(), said["plan"]["ranks"].as_u64()), (Some(6), Some(2)));

    assert!(done(&dir, &["ckpt", "check", "runs/small"]).matches("  ok").count() == 3);
    assert!(done(&dir, &["ckpt", "diff", "runs/small", "runs/small"]).contains("the same"));
    let other = ["ckpt", "diff", "runs/small", "runs/small/checkpoints/step-00000002", "--json"];
    let run = lockstep(&dir, &other);
    let said: serde_json::Value = serde_json::from_slice(&run.stdout).expect("one object");
    assert!(!run.status.success() && said["same"] == false, "{said}");
    assert_eq!(said["steps"], serde_json::json!([6, 2]));
    assert!(said["first"][0]["max_abs"].as_f64().expect("a number") > 0.0, "{said}");

    // A folder of any step; and of one that is not there.
    let said = done(&dir, &["export", "runs/small", "--step", "4", "--to", "out", "--json"]);
    assert!(said.contains("\"step\":4"), "{said}");
    let run = lockstep(&dir, &["export", "runs/small", "--step", "5", "--to", "other"]);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && error.contains("existing steps: 6, 4, 2"), "{error}");

    // A flipped bit: the check names the file, a resumed run takes the one before and says so.
    let path = dir.join("runs/small/checkpoints/step-00000006/rank-00001.safetensors");
    let mut bytes = fs::read(&path).expect("rank 1's file");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).expect("written");
    let run = lockstep(&dir, &["ckpt", "check", "runs/small"]);
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(
        !run.status.success() && said.contains("rank-00001.safetensors is corrupt at byte 0"),
        "{said}"
    );
    let words = ["train", "small.toml", "--engine", "threads", "--ranks", "1", "--resume"];
    let run = lockstep(&dir, &words);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && error.contains("skipped"), "{error}");
    assert!(done(&dir, &["ckpt", "check", "runs/small"]).contains("step-00000006  ok"));
}
