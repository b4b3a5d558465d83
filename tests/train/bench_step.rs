//! Tests of `lockstep bench step`.

use serde_json::Value;

use crate::workspace::Workspace;

#[test]
fn measured_memory_matches_the_plan() {
    let workspace = Workspace::new("bench-step");
    for args in
        ["--ranks 1", "--ranks 2 --dtype bf16", "--ranks 2 --engine threads --recompute full"]
    {
        let output =
            workspace.output(&format!("bench step --config small.toml --steps 2 --json {args}"));
        let record: Value = serde_json::from_str(&output).expect("one object");
        assert_eq!(
            (record["config"].as_str(), record["steps"].as_u64()),
            (Some("small.toml"), Some(2))
        );
        assert_eq!(record["ranks"].to_string(), args[8..9], "{record}");
        let numbers = [
            "step_ms",
            "tokens_per_s",
            "gflops",
            "gemm_peak_gflops",
            "mfu",
            "comm_exposed",
            "peak_bytes",
        ];
        for name in numbers {
            assert!(record[name].as_f64().is_some_and(|number| number > 0.0), "{name}: {record}");
        }
        let memory = record["memory"].as_array().expect("a list");
        assert_eq!(memory.len(), 5, "{record}");
        for row in memory {
            match row["tag"].as_str().expect("a name") {
                "parameters" | "gradients" | "optimizer" => {
                    assert_eq!(row["planned"], row["peak"], "{args}")
                }
                "activations" => {
                    let (planned, peak) = (row["planned"].as_f64(), row["peak"].as_f64());
                    let error = peak.expect("bytes") / planned.expect("bytes") - 1.0;
                    assert!(error.abs() < 0.03, "{args}: {row}");
                }
                _ => {
                    assert!(row["planned"].is_null() && row["peak"].as_u64() > Some(0), "{row}")
                }
            }
        }
    }
    let table = workspace.output("bench step --config small.toml --steps 1");
    for part in ["tokens/s", "GFLOP/s", "matmul", "memory (MiB)", "parameters"] {
        assert!(table.contains(part), "no {part:?} in:\n{table}");
    }
}

#[test]
fn runs_on_any_layout() {
    let workspace = Workspace::new("bench-step-layouts");
    for (args, ranks) in [
        ("--ranks 2 --set layout.zero=3", 2),
        ("--set layout.tensor=2 --engine threads", 2),
        ("--ranks 4 --set layout.tensor=2 --engine threads", 4),
    ] {
        let output =
            workspace.output(&format!("bench step --config small.toml --steps 1 --json {args}"));
        let record: Value = serde_json::from_str(&output).expect("one object");
        assert_eq!(record["ranks"].as_u64(), Some(ranks), "{args}: {record}");
        // Both axes halve the optimizer state.
        let optimizer = |record: &Value| {
            let memory = record["memory"].as_array().expect("a list");
            let row = memory.iter().find(|row| row["tag"] == "optimizer").expect("a row");
            row["peak"].as_f64().expect("bytes")
        };
        let one = workspace.output("bench step --config small.toml --steps 1 --json --ranks 1");
        let one: Value = serde_json::from_str(&one).expect("one object");
        let share = optimizer(&record) / optimizer(&one);
        assert!((0.5..0.6).contains(&share), "{args}: {share}");
    }
    workspace.assert_fails(
        "bench step --config tiny --ranks 2 --set layout.tensor=4",
        &["tensor=4 needs 4 ranks, but 2 ranks were started"],
    );
}
