//! Drives the binary: `lockstep plan`, and how `lockstep train` uses a plan.

use std::path::PathBuf;
use std::process::{Command, Output};

fn lockstep(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lockstep")).args(words).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("lockstep-plan-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

const RUN: &str = "name = \"run\"\n[model]\npreset = \"llama3-8b\"\nseq = 4096\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
                   [layout]\ndata = 4\nzero = 1\ntensor = 4\nsequence = true\npipe = 4\n[precision]\ncompute = \"bf16\"\n";

#[test]
fn a_run_file_is_priced() {
    let folder = folder("priced");
    let (run, page) = (folder.join("run.toml"), folder.join("page.html"));
    std::fs::write(&run, RUN).unwrap();
    let words = ["plan", run.to_str().unwrap(), "--cluster", "examples/clusters/h100-64.toml"];
    let text = lockstep(&[&words[..], &["--html", page.to_str().unwrap()]].concat());
    assert!(text.status.success(), "{}", err(&text));
    let shown = out(&text);
    for part in ["memory per rank", "NVSwitch", "pipeline timeline", "MFU", "fits: "] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));

    let json = lockstep(&[&words[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["fits"], true);
    assert!(json["step_s"].as_f64().unwrap() > 0.0 && json["mfu"].as_f64().unwrap() < 1.0);
    assert_eq!(json["memory"].as_array().unwrap().len(), 4);
    assert!(json["memory"][0]["parameters"].as_f64().unwrap() > 0.0);
    let traffic = json["traffic"].as_array().unwrap();
    assert!(
        traffic.iter().any(|row| row["kind"] == "tensor" && row["link"] == "NVSwitch"),
        "{traffic:?}"
    );
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn presets_are_searched() {
    let output =
        lockstep(&["plan", "--preset", "llama3-8b", "--cluster", "h100-16", "--advice", "--json"]);
    assert!(output.status.success(), "{}", err(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = json["found"].as_array().unwrap();
    assert_eq!(found.len(), 5);
    assert_eq!(found[0]["step_s"], json["step_s"]);
    assert!(found.iter().all(|one| one["fits"] == true && one["ranks"] == 16));
    assert!(!json["reasons"].as_array().unwrap().is_empty());
    let steps = json["advice"].as_array().unwrap();
    assert_eq!(steps[0]["technique"], "data parallel");
}

#[test]
fn errors_suggest_a_fix() {
    let cases: [(&[&str], &str); 5] = [
        (&["plan", "--preset", "llama3-8b", "--cluster", "h10-8"], "did you mean `h100-8`?"),
        (&["plan", "--preset", "lama3-8b", "--cluster", "h100-8"], "did you mean `llama3-8b`?"),
        (&["plan", "--preset", "llama3-405b", "--cluster", "h100-8"], "nothing fits on 8 × H100"),
        (&["plan", "examples/grammar.toml", "--cluster", "no.toml"], "cannot read no.toml"),
        (
            &["plan", "examples/grammar.toml", "--cluster", "h100-8", "--ranks", "16"],
            "16 ranks are more than cluster h100-8 has (8)",
        ),
    ];
    for (words, told) in cases {
        let output = lockstep(words);
        assert!(
            !output.status.success() && err(&output).contains(told),
            "{words:?}: {}",
            err(&output)
        );
    }
}

#[test]
fn a_plan_that_does_not_fit_is_printed_and_fails() {
    let folder = folder("large");
    let run = folder.join("run.toml");
    std::fs::write(&run, RUN.replace("llama3-8b", "llama3-405b").replace("data = 4", "data = 1"))
        .unwrap();
    let output = lockstep(&["plan", run.to_str().unwrap(), "--cluster", "h100-16"]);
    assert!(!output.status.success());
    assert!(out(&output).contains("does not fit: "), "{}{}", out(&output), err(&output));
    std::fs::remove_dir_all(folder).unwrap();
}

/// What can only be planned is planned, and neither trained nor verified.
#[test]
fn latent_attention_is_for_planning_only() {
    let priced = lockstep(&["plan", "--preset", "deepseek-v2-lite", "--cluster", "h100-64"]);
    assert!(priced.status.success(), "{}", err(&priced));
    assert!(out(&priced).contains("deepseek-v2-lite"), "{}", out(&priced));
    let folder = folder("planned-only");
    let run = folder.join("run.toml");
    let small = "[model]\nfamily = \"moe\"\ndim = 64\nheads = 2\nlayers = 2\nexperts = 4\nkv_lora_rank = 16\n";
    std::fs::write(&run, small).unwrap();
    for command in ["train", "verify"] {
        let refused = lockstep(&[command, run.to_str().unwrap()]);
        assert!(!refused.status.success());
        let told = err(&refused);
        assert!(told.contains("kv_lora_rank") && told.contains("for planning only"), "{told}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// A model that no machine of today has memory for is refused before a rank is started.
#[test]
fn train_rejects_models_that_do_not_fit() {
    let folder = folder("refused");
    let run = folder.join("run.toml");
    let huge = "[model]\nfamily = \"llama\"\ndim = 65536\nlayers = 200\nheads = 64\nseq = 64\n[train]\nglobal_batch = 1\n";
    std::fs::write(&run, huge).unwrap();
    let runs = folder.join("runs");
    let output = lockstep(&["train", run.to_str().unwrap(), "--runs", runs.to_str().unwrap()]);
    assert!(!output.status.success());
    assert!(err(&output).contains("and this machine has"), "{}", err(&output));
    assert!(!runs.exists(), "nothing was made");
    std::fs::remove_dir_all(folder).unwrap();
}
