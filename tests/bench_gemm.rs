//! Tests of the binary: `lockstep bench gemm`.

mod program;

use std::process::Output;

fn bench(arguments: &[&str]) -> Output {
    let mut command = program::lockstep();
    command.args(["bench", "gemm"]).args(arguments);
    command.output().expect("the binary runs")
}

#[test]
fn all_orders_types_and_levels_are_correct() {
    for dtype in ["f32", "bf16"] {
        for more in [["--threads", "1"], ["--threads", "2"], ["--level", "portable"]] {
            let layers = ["--shapes", "70x96x33,5x64x40", "--seconds", "0.001", "--json"];
            let run = bench(&[&["--dtype", dtype], &more[..], &layers].concat());
            let error = String::from_utf8_lossy(&run.stderr);
            assert!(run.status.success(), "{dtype} {more:?}: {error}");
            let output = String::from_utf8_lossy(&run.stdout);
            let records: Vec<serde_json::Value> = output
                .lines()
                .map(|line| serde_json::from_str(line).expect("one object per line"))
                .collect();
            let found: Vec<_> = records
                .iter()
                .map(|r| format!("{} {} {} {}", r["order"], r["m"], r["n"], r["k"]))
                .collect();
            let expected = [
                "\"nt\" 70 96 33",
                "\"nn\" 70 33 96",
                "\"tn\" 96 33 70",
                "\"nt\" 5 64 40",
                "\"nn\" 5 40 64",
                "\"tn\" 64 40 5",
            ];
            assert_eq!(found, expected);
            assert!(records.iter().all(|record| record["wrong"] == 0), "{output}");
        }
    }
}

/// LOCKSTEP_LEVEL limits the instruction set of every command; an unknown level is an error.
#[test]
fn the_environment_limits_the_level() {
    let at = |level: &str| {
        let mut command = program::lockstep();
        command.args(["bench", "gemm", "--shapes", "32x32x32", "--seconds", "0.001", "--json"]);
        command.env("LOCKSTEP_LEVEL", level).output().expect("the binary runs")
    };
    let run = at("portable");
    let record = String::from_utf8_lossy(&run.stdout);
    assert!(record.contains("\"level\":\"portable\""), "{record}");
    let run = at("sse");
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && run.stdout.is_empty());
    let expected = "error: LOCKSTEP_LEVEL=sse: unknown level; use portable, avx2, avx512 or amx";
    assert_eq!(error.trim(), expected);
}

#[test]
fn errors_suggest_a_fix() {
    for (arguments, part) in [
        (["--shapes", "3x4"], "use TOKENSxOUTPUTSxINPUTS"),
        (["--dtype", "f16"], "use f32 or bf16"),
        (["--level", "neon"], "unknown level; use portable, avx2, avx512 or amx"),
        (["--threads", "0"], "--threads must be at least 1 (got 0)"),
    ] {
        let run = bench(&arguments);
        assert!(!run.status.success());
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}
