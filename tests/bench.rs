//! Tests of the binary: `lockstep bench comm`. It starts its own ranks. Large buffers are in the shared heap by default.

mod program;

use std::process::Output;

fn bench(arguments: &[&str]) -> Output {
    let mut command = program::lockstep();
    command.args(["bench", "comm"]).args(arguments);
    command.output().expect("the binary runs")
}

/// Runs a benchmark and asserts that it prints `rows` rows without wrong results.
fn assert_correct(arguments: &[&str], rows: usize) -> Vec<serde_json::Value> {
    let run = bench(&[arguments, &["--json", "--seconds", "0.01"]].concat());
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{arguments:?}: {error}");
    let output = String::from_utf8_lossy(&run.stdout);
    let records: Vec<serde_json::Value> = output
        .lines()
        .map(|line| serde_json::from_str(line).expect("one object per line"))
        .collect();
    assert_eq!(records.len(), rows, "{arguments:?}: {output}");
    for record in &records {
        assert_eq!(record["wrong"], 0, "{arguments:?}: {record}");
        assert!(record["time_us"].as_f64().is_some_and(|t| t > 0.0), "{record}");
    }
    records
}

#[test]
fn all_collectives_are_correct_on_all_engines() {
    for engine in ["threads", "shm", "tcp"] {
        for ranks in ["1", "2", "3"] {
            let arguments =
                ["--op", "all", "--sizes", "4K,300001,1M", "--engine", engine, "--ranks", ranks];
            assert_correct(&arguments, 24);
        }
    }
}

#[test]
fn all_types_and_reductions_are_correct() {
    for dtype in ["f64", "f16", "bf16", "i32", "i64", "u8"] {
        for reduce in ["sum", "mean", "min", "max", "product"] {
            let arguments = ["--ranks", "2", "--sizes", "1M", "--dtype", dtype, "--reduce", reduce];
            assert_correct(&arguments, 1);
        }
    }
}

#[test]
fn all_collectives_are_correct_with_all_buffers() {
    for buffers in ["private", "symmetric"] {
        for ranks in ["2", "3"] {
            let arguments =
                ["--op", "all", "--ranks", ranks, "--sizes", "4K,300001,1M", "--buffers", buffers];
            let records = assert_correct(&arguments, 24);
            assert!(records.iter().all(|record| record["buffers"] == buffers), "{records:?}");
        }
    }
}

#[test]
fn algorithms_can_be_chosen() {
    for algo in ["ring", "tree", "halving", "two_level"] {
        let records = assert_correct(&["--ranks", "3", "--sizes", "1M", "--algo", algo], 1);
        assert_eq!(records[0]["algo"], algo, "the algorithm of the benchmark's own calls");
    }
}

#[test]
fn errors_suggest_a_fix() {
    for (arguments, part) in [
        (vec!["--op", "all_reduc"], "unknown operation all_reduc; use all_reduce"),
        (vec!["--sizes", "4X"], "use e.g. 4096, 4K, 16M or 1G"),
        (vec!["--dtype", "f8"], "one of f32"),
        (vec!["--ranks", "0"], "--ranks must be at least 1 (got 0)"),
        (vec!["--ranks", "2", "--op", "gather", "--algo", "ring"], "use direct, flat"),
    ] {
        let run = bench(&arguments);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success(), "{arguments:?}");
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}
