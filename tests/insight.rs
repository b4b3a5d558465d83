//! Tests of the binary: `train --trace`, `trace` and `doctor`.

mod program;

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use program::{empty_directory, output, run_in};

const RUN: &str = "name = \"run\"\n[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 8\nglobal_batch = 8\nmicro_batch = 2\n\
                   warmup = 2\nlog_every = 1\neval_every = 0\n[layout]\ndata = 2\n";

fn folder(name: &str) -> PathBuf {
    let dir = empty_directory(&format!("insight-{name}"));
    fs::write(dir.join("run.toml"), RUN).expect("the directory is writable");
    dir
}

#[test]
fn a_timeline_is_recorded_printed_and_compared() {
    let dir = folder("trace");
    let printed = output(&dir, &["train", "run.toml", "--trace", "3..5"]);
    assert!(
        printed.contains("timeline of steps 3 to 5: runs/run/trace/steps-3-5.json.gz"),
        "{printed}"
    );
    assert!(printed.lines().any(|line| line.starts_with("doctor: ")), "{printed}");
    assert!(dir.join("runs/run/trace/steps-3-5.json.gz").exists());
    let text = output(&dir, &["trace", "runs/run"]);
    for part in ["steps 3 to 5: 2 rank(s)", "critical path of step", "longest spans", "matmul"] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
    let json: Value =
        serde_json::from_str(&output(&dir, &["trace", "runs/run", "--json"])).expect("JSON");
    for (rank, reported) in json["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .zip(json["reported"].as_array().expect("reports"))
    {
        let steps = reported.as_array().expect("steps");
        let mean = steps.iter().map(|step| step["exposed"].as_f64().expect("seconds")).sum::<f64>()
            / steps.len() as f64;
        let exposed = rank["exposed"].as_f64().expect("seconds");
        assert!((exposed / mean - 1.0).abs() < 0.02, "{exposed} and {mean}");
    }
    let compared = output(&dir, &["trace", "runs/run", "runs/run/trace/steps-3-5"]);
    assert!(
        compared.lines().any(|line| line.contains("step") && line.contains("+0.0%")),
        "{compared}"
    );
}

#[test]
fn the_doctor_judges_a_finished_run() {
    let dir = folder("doctor");
    output(&dir, &["train", "run.toml", "--set", "layout.recompute=full"]);
    let text = output(&dir, &["doctor", "runs/run"]);
    assert!(text.starts_with("run: finished at step 8 of 8\nverdict: "), "{text}");
    let json: Value =
        serde_json::from_str(&output(&dir, &["doctor", "runs/run", "--json"])).expect("JSON");
    let shares: f64 = json["limits"]
        .as_array()
        .expect("limits")
        .iter()
        .map(|limit| limit["share"].as_f64().expect("a share"))
        .sum();
    assert!((0.9..1.01).contains(&shares), "{text}");
}

#[test]
fn the_doctor_names_the_cause_of_a_failure() {
    let dir = folder("failed");
    let run =
        run_in(&dir, &["train", "run.toml", "--set", "train.lr=1e30", "--set", "train.warmup=0"]);
    assert!(!run.status.success());
    let doctor = run_in(&dir, &["doctor", "runs/run"]);
    let text = String::from_utf8_lossy(&doctor.stdout);
    assert_eq!(doctor.status.code(), Some(2), "{text}");
    assert!(text.contains("what went wrong: NaN or infinity (deterministic"), "{text}");
    assert!(text.contains("is not finite"), "{text}");
}

#[test]
fn errors_say_what_to_do() {
    let dir = folder("errors");
    for (args, expected) in [
        (
            &["train", "run.toml", "--trace", "9..3", "--dry-run"][..],
            "write the first and the last step",
        ),
        (&["trace", "runs/none"], "has no timeline; record one with"),
        (&["trace", "runs/none", "--request", "3"], "is not the folder of a run that is training"),
        (&["doctor", "runs/none"], "is not a run folder"),
    ] {
        let run = run_in(&dir, args);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && error.contains(expected), "{args:?}: {error}");
    }
}
