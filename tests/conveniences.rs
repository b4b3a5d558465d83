//! Tests of the binary: starter files, presets, completions, the version, quiet and JSON output, and colors.

mod program;

use std::path::PathBuf;

use serde_json::Value;

use program::{empty_directory, output, run_in};

fn folder(name: &str) -> PathBuf {
    empty_directory(&format!("conveniences-{name}"))
}

#[test]
fn a_starter_run_file_is_written_once_and_trains() {
    let dir = folder("init");
    let told = output(&dir, &["init", "gpt2-test"]);
    assert!(told.contains("lockstep train gpt2-test.toml"), "{told}");
    let again = run_in(&dir, &["init", "gpt2-test"]);
    let error = String::from_utf8_lossy(&again.stderr);
    assert!(!again.status.success() && error.contains("gpt2-test.toml exists"), "{error}");
    output(&dir, &["init", "gpt2-test", "--force"]);
    let short = ["--set", "train.steps=3", "--set", "train.warmup=1", "--set", "train.log_every=1"];
    let train =
        |style| output(&dir, &[&["train", "gpt2-test.toml", style][..], &short[..]].concat());
    let printed = train("--quiet");
    assert!(!printed.contains("step 1/3") && printed.contains("run folder: "), "{printed}");
    assert!(dir.join("runs/gpt2-test/metrics.jsonl").exists());

    let json = train("--json");
    let reports: Vec<Value> =
        json.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let steps: Vec<u64> =
        reports.iter().filter_map(|r| r["loss"].as_f64().and(r["step"].as_u64())).collect();
    assert_eq!(steps, [1, 2, 3], "{json}");

    let unknown = run_in(&dir, &["init", "gpt2-124n"]);
    let error = String::from_utf8_lossy(&unknown.stderr);
    assert!(error.contains("did you mean `gpt2-124m`?"), "{error}");
}

#[test]
fn presets_are_listed_with_their_sizes() {
    let dir = folder("presets");
    let text = output(&dir, &["presets"]);
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).expect("a row");
    assert!(row("gpt2-124m").contains("124M"), "{text}");
    assert!(row("mixtral-8x7b").ends_with("2 of 8"), "{text}");
    let json = output(&dir, &["presets", "--json"]);
    let first: Value = serde_json::from_str(json.lines().next().expect("a line")).expect("JSON");
    assert_eq!(first["preset"], "gpt2-test");
    assert_eq!(json.lines().count() + 1, text.lines().count());
}

#[test]
fn completions_name_every_command() {
    let dir = folder("completions");
    for shell in ["bash", "zsh", "fish"] {
        let script = output(&dir, &["completions", shell]);
        for command in ["train", "doctor", "init", "presets"] {
            assert!(script.contains(command), "{shell}: {command} is missing");
        }
    }
    assert!(!run_in(&dir, &["completions", "tcl"]).status.success());
}

#[test]
fn the_version_names_the_commit() {
    let version = output(&folder("version"), &["--version"]);
    let expected = format!("lockstep {}", env!("CARGO_PKG_VERSION"));
    assert!(version.starts_with(&expected), "{version}");
    let commit = version.trim().strip_prefix(&expected).expect("checked above").trim();
    let is_commit = |text: &str| {
        text.len() >= 9 && text[1..text.len() - 1].chars().all(|c| c.is_ascii_hexdigit())
    };
    assert!(commit.is_empty() || is_commit(commit), "{version}");
}

#[test]
fn output_that_is_not_a_terminal_has_no_color() {
    let run = run_in(&folder("color"), &["train", "missing.toml"]);
    assert!(!run.stderr.contains(&0x1b), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(String::from_utf8_lossy(&run.stderr).starts_with("error: "));
}
