//! Tests of the binary: `lockstep verify` on a small run file.

mod program;

use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

/// A model with a few thousand parameters on the built-in grammar. `verify` ignores its layout.
const SMALL: &str = r#"
name = "small"
[model]
preset = "llama-test"
[train]
steps = 100
global_batch = 8
micro_batch = 1
lr = 3e-3
warmup = 2
threads = 1
[layout]
data = 8
zero = 3
"#;

struct Finished {
    ok: bool,
    out: String,
    err: String,
}

/// Runs `lockstep verify small.toml` with more arguments.
fn verify(more: &[&str]) -> Finished {
    // Each call has its own directory, so that no rank reads a file while another call rewrites it.
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("verify-{call}"));
    fs::create_dir_all(&dir).expect("the target directory is writable");
    fs::write(dir.join("small.toml"), SMALL).expect("the directory is writable");
    let Output { status, stdout, stderr } = program::lockstep()
        .args(["verify", "small.toml"])
        .args(more)
        .args(if more.contains(&"--steps") { &[][..] } else { &["--steps", "4"] })
        .current_dir(&dir)
        .output()
        .expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Finished { ok: status.success(), out: text(stdout), err: text(stderr) }
}

const THREE: &str = "data=2 zero=1; tensor=2,sequence=true; pipe=2 schedule=zb-h1 data=2";

#[test]
fn prints_a_table_of_layouts() {
    let finished = verify(&["--layouts", THREE]);
    assert!(finished.ok, "{}{}", finished.out, finished.err);
    let lines: Vec<&str> = finished.out.lines().collect();
    assert_eq!(lines.len(), 6, "{}", finished.out);
    assert!(lines[0].starts_with("small: llama, 0.01M parameters, f32; 4 steps"), "{}", lines[0]);
    assert!(lines[0].ends_with("losses within 2e-5, weights within 1e-4"), "{}", lines[0]);
    let columns: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!(columns, ["layout", "ranks", "loss", "norm", "weights", "ok"]);
    for (line, layout, ranks) in [
        (lines[2], "data=2 zero=1 ", "2"),
        (lines[3], "tensor=2,sequence=true ", "2"),
        (lines[4], "pipe=2 schedule=zb-h1 data=2 ", "4"),
    ] {
        let rest = line.strip_prefix(layout).unwrap_or_else(|| panic!("{layout} is not in {line}"));
        let cells: Vec<&str> = rest.split_whitespace().collect();
        assert_eq!((cells.len(), cells[0], cells[4]), (5, ranks, "yes"), "{line}");
    }
    assert_eq!(lines[5], "3 of 3 layouts agree with one rank");
}

#[test]
fn a_layout_may_have_a_placement() {
    let layouts = "data=2 tensor=2 placement=tensor,pipe,context,data; \
                   placement=\"data, context, tensor, pipe\" pipe=2 tensor=2";
    let finished = verify(&["--layouts", layouts]);
    assert!(finished.ok, "{}{}", finished.out, finished.err);
    assert!(finished.out.ends_with("2 of 2 layouts agree with one rank\n"), "{}", finished.out);
    let finished = verify(&["--layouts", "data=2 placement=data,data"]);
    let expected = "placement must list each of the four axes once (got \"data,data\")";
    assert!(!finished.ok && finished.err.contains(expected), "{}", finished.err);
}

/// Compressed gradients differ from those of one rank. Layouts without replicas are still held to the strict tolerance.
#[test]
fn compressed_gradients_have_a_larger_tolerance() {
    let finished = verify(&["--set", "comm.compression=int8", "--layouts", "data=2; tensor=2"]);
    assert!(finished.ok, "{}{}", finished.out, finished.err);
    let lines: Vec<&str> = finished.out.lines().collect();
    assert!(lines[0].ends_with("losses within 2e-5, weights within 1e-4"), "{}", lines[0]);
    let expected = "with int8 gradient compression: losses within 2e-2, weights within 1e-1";
    assert_eq!(lines[1], expected);
    assert_eq!(lines[lines.len() - 1], "2 of 2 layouts agree within their tolerances");
    let strict = ["--set", "comm.compression=int8", "--layouts", "data=2", "--tolerance", "1e-7"];
    assert!(!verify(&strict).ok, "int8 has a larger error");
}

#[test]
fn json_is_the_same_from_threads_and_processes() {
    let rows = |engine: &str| -> Vec<Value> {
        let finished = verify(&["--json", "--engine", engine, "--layouts", THREE]);
        assert!(finished.ok, "{engine}: {}{}", finished.out, finished.err);
        finished
            .out
            .lines()
            .map(|line| serde_json::from_str(line).expect("an object per line"))
            .collect()
    };
    let threads = rows("threads");
    assert_eq!(threads.len(), 3);
    for (row, (layout, ranks)) in threads.iter().zip(THREE.split("; ").zip([2, 2, 4])) {
        assert_eq!((&row["layout"], &row["ranks"]), (&layout.into(), &ranks.into()), "{row}");
        assert_eq!((&row["ok"], &row["tensor"]), (&true.into(), &Value::Null), "{row}");
        for (error, limit) in
            [("loss_rel_err", 2e-5), ("norm_rel_err", 1e-4), ("weight_rel_err", 1e-4)]
        {
            assert!((0.0..=limit).contains(&row[error].as_f64().expect("a number")), "{row}");
        }
    }
    // Every engine sums in the same order.
    assert_eq!(threads, rows("shm"));
    assert_eq!(threads, rows("tcp"));
}

#[test]
fn a_difference_is_an_error_that_names_the_first_tensor() {
    let finished = verify(&["--layouts", "tensor=2", "--tolerance", "1e-15"]);
    assert!(!finished.ok, "{}", finished.out);
    assert!(finished.out.contains("NO: embed.tokens differs by "), "{}", finished.out);
    assert!(finished.err.contains("1 of 1 layouts differ from one rank"), "{}", finished.err);

    let finished = verify(&["--layouts", "tensor=2; pipe=2", "--tolerance", "1,1e-15", "--json"]);
    assert!(!finished.ok, "{}", finished.out);
    let rows: Vec<Value> = finished
        .out
        .lines()
        .map(|line| serde_json::from_str(line).expect("an object per line"))
        .collect();
    assert_eq!((&rows[0]["ok"], &rows[0]["tensor"]), (&false.into(), &"embed.tokens".into()));
    // Pipeline stages do not change the order of sums.
    assert_eq!((&rows[1]["ok"], &rows[1]["weight_rel_err"]), (&true.into(), &0.0.into()));
}

#[test]
fn invalid_layouts_are_reported_together_before_training() {
    let finished = verify(&["--layouts", "data=2; tensor=3; pipe=4; sequens=true; tensor"]);
    assert!(!finished.ok && finished.out.is_empty(), "{}", finished.out);
    for part in [
        "invalid layouts:",
        "tensor=3: 2 errors:",
        "layout.tensor (--layouts): tensor=3 does not divide heads=4; use 2 or 4",
        "pipe=4: layout.pipe (--layouts): pipe=4 stages are more than layers=2",
        "sequens=true: layout.sequens (--layouts): unknown key; did you mean layout.sequence?",
        "tensor: layout (--layouts): `tensor` has no `=`; write for example tensor=2",
    ] {
        assert!(finished.err.contains(part), "no {part:?} in:\n{}", finished.err);
    }
    for (args, part) in [
        (["--layouts", " ; "], "--layouts is empty"),
        (["--set", "layout.data=2"], "choose layouts with --layouts"),
        (["--set", "train.lr=-1"], "train.lr (--set): lr must be greater than 0 (got -1)"),
        (["--layouts", "data=3"], "global_batch=8 is not a multiple of data=3"),
        (["--tolerance", "1,2,3"], "--tolerance takes one or two numbers"),
    ] {
        let finished = verify(&args);
        assert!(
            !finished.ok && finished.err.contains(part),
            "{args:?}: no {part:?} in:\n{}",
            finished.err
        );
    }
}

#[test]
fn default_layouts_cover_every_axis() {
    let finished = verify(&["--steps", "1", "--json"]);
    assert!(finished.ok, "{}{}", finished.out, finished.err);
    for word in ["data=4", "tensor=2", "context=2", "pipe=2", "zero=3", "sequence=true", "zb-h2"] {
        assert!(finished.out.contains(word), "no {word} in:\n{}", finished.out);
    }
}
