//! `lockstep bench comm` as its users run it: the real binary starts its own ranks, whose large
//! buffers lie in the shared heap unless asked for elsewhere.

use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    command.args(["bench", "comm"]).args(arguments);
    command.output().expect("the binary runs")
}

/// Every operation at every size came back, and no value was wrong.
fn all_right(arguments: &[&str], rows: usize) -> Vec<serde_json::Value> {
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
fn every_operation_is_right_on_every_engine() {
    for engine in ["threads", "shm", "tcp"] {
        for ranks in ["1", "2", "3"] {
            let arguments =
                ["--op", "all", "--sizes", "4K,300001,1M", "--engine", engine, "--ranks", ranks];
            all_right(&arguments, 24);
        }
    }
}

#[test]
fn every_type_and_reduction_is_right() {
    for dtype in ["f64", "f16", "bf16", "i32", "i64", "u8"] {
        for reduce in ["sum", "mean", "min", "max", "product"] {
            let arguments = ["--ranks", "2", "--sizes", "1M", "--dtype", dtype, "--reduce", reduce];
            all_right(&arguments, 1);
        }
    }
}

#[test]
fn every_operation_is_right_wherever_its_buffers_lie() {
    for buffers in ["private", "symmetric"] {
        for ranks in ["2", "3"] {
            let arguments =
                ["--op", "all", "--ranks", ranks, "--sizes", "4K,300001,1M", "--buffers", buffers];
            let records = all_right(&arguments, 24);
            assert!(records.iter().all(|record| record["buffers"] == buffers), "{records:?}");
        }
    }
}

#[test]
fn algorithms_can_be_fixed() {
    for algo in ["ring", "tree", "halving", "two_level"] {
        all_right(&["--ranks", "3", "--sizes", "1M", "--algo", algo], 1);
    }
}

#[test]
fn mistakes_are_told_with_the_way_out() {
    for (arguments, hint) in [
        (vec!["--op", "all_reduc"], "one of all_reduce"),
        (vec!["--sizes", "4X"], "write 4096, 4K, 16M or 1G"),
        (vec!["--dtype", "f8"], "one of f32"),
        (vec!["--ranks", "0"], "at least one rank"),
        (vec!["--ranks", "2", "--op", "gather", "--algo", "ring"], "use direct, flat"),
    ] {
        let run = bench(&arguments);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success(), "{arguments:?}");
        assert!(error.contains(hint), "{arguments:?}: {error}");
    }
}
