//! `bench step`.

use serde_json::Value;

use crate::desk::Desk;

#[test]
fn a_measured_step_is_told_with_its_memory_as_planned() {
    let desk = Desk::new("step");
    for words in
        ["--ranks 1", "--ranks 2 --dtype bf16", "--ranks 2 --engine threads --recompute full"]
    {
        let said = desk.done(&format!("bench step --config small.toml --steps 2 --json {words}"));
        let record: Value = serde_json::from_str(&said).expect("one object");
        assert_eq!(
            (record["config"].as_str(), record["steps"].as_u64()),
            (Some("small.toml"), Some(2))
        );
        assert_eq!(record["ranks"].to_string(), words[8..9], "{record}");
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
        for held in memory {
            match held["tag"].as_str().expect("a name") {
                "parameters" | "gradients" | "optimizer" => {
                    assert_eq!(held["planned"], held["peak"], "{words}")
                }
                "activations" => {
                    let (planned, peak) = (held["planned"].as_f64(), held["peak"].as_f64());
                    let off = peak.expect("bytes") / planned.expect("bytes") - 1.0;
                    assert!(off.abs() < 0.03, "{words}: {held}");
                }
                _ => {
                    assert!(held["planned"].is_null() && held["peak"].as_u64() > Some(0), "{held}")
                }
            }
        }
    }
    let table = desk.done("bench step --config small.toml --steps 1");
    for said in ["tokens/s", "GFLOP/s", "matmul", "memory (MiB)", "parameters"] {
        assert!(table.contains(said), "no {said:?} in:\n{table}");
    }
}

#[test]
fn a_measured_step_takes_any_layout() {
    let desk = Desk::new("step-layouts");
    for (words, ranks) in [
        ("--ranks 2 --set layout.zero=3", 2),
        ("--set layout.tensor=2 --engine threads", 2),
        ("--ranks 4 --set layout.tensor=2 --engine threads", 4),
    ] {
        let said = desk.done(&format!("bench step --config small.toml --steps 1 --json {words}"));
        let record: Value = serde_json::from_str(&said).expect("one object");
        assert_eq!(record["ranks"].as_u64(), Some(ranks), "{words}: {record}");
        // Half of the moments of one rank, whichever axis it is that cuts them.
        let optimizer = |record: &Value| {
            let memory = record["memory"].as_array().expect("a list");
            let held = memory.iter().find(|held| held["tag"] == "optimizer").expect("it is told");
            held["peak"].as_f64().expect("bytes")
        };
        let alone = desk.done("bench step --config small.toml --steps 1 --json --ranks 1");
        let alone: Value = serde_json::from_str(&alone).expect("one object");
        let share = optimizer(&record) / optimizer(&alone);
        assert!((0.5..0.6).contains(&share), "{words}: {share}");
    }
    desk.refused(
        "bench step --config tiny --ranks 2 --set layout.tensor=4",
        &["tensor=4 needs 4 ranks", "2 ranks were started"],
    );
}
