//! `lockstep verify` as its users run it: the real binary, small run files.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

/// A few thousand parameters on the built-in grammar, with a layout that is to be passed over.
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

struct Ran {
    ok: bool,
    out: String,
    err: String,
}

/// `lockstep verify small.toml` with some more words.
fn verify(more: &[&str]) -> Ran {
    // A folder of its own: a file that is being written again would be read half by somebody's ranks.
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("verify-{call}"));
    fs::create_dir_all(&dir).expect("the target folder can be written");
    fs::write(dir.join("small.toml"), SMALL).expect("the test's folder can be written");
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_lockstep"))
        .args(["verify", "small.toml"])
        .args(more)
        .args(if more.contains(&"--steps") { &[][..] } else { &["--steps", "4"] })
        .current_dir(&dir)
        .output()
        .expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran { ok: status.success(), out: text(stdout), err: text(stderr) }
}

const THREE: &str = "data=2 zero=1; tensor=2,sequence=true; pipe=2 schedule=zb-h1 data=2";

#[test]
fn a_table_of_layouts() {
    let ran = verify(&["--layouts", THREE]);
    assert!(ran.ok, "{}{}", ran.out, ran.err);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!(lines.len(), 6, "{}", ran.out);
    assert!(lines[0].starts_with("small: Llama, 0.01M parameters, F32; 4 steps"), "{}", lines[0]);
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
    assert_eq!(lines[5], "3 of 3 layouts are the same training");
}

/// What replicas send in fewer bytes is not what one rank computes; the others still are held to it.
#[test]
fn lossy_gradients_have_a_tolerance_of_their_own() {
    let ran = verify(&["--set", "comm.compression=int8", "--layouts", "data=2; tensor=2"]);
    assert!(ran.ok, "{}{}", ran.out, ran.err);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert!(lines[0].ends_with("losses within 2e-5, weights within 1e-4"), "{}", lines[0]);
    let told = "replicas send their gradients as int8, which loses or delays some of them: there, losses within 2e-2, \
                weights within 1e-1";
    assert_eq!(lines[1], told);
    assert_eq!(lines[lines.len() - 1], "2 of 2 layouts are within their tolerance");
    let strict = ["--set", "comm.compression=int8", "--layouts", "data=2", "--tolerance", "1e-7"];
    assert!(!verify(&strict).ok, "int8 rounds more than that");
}

#[test]
fn json_for_programs_from_threads_and_processes() {
    let rows = |engine: &str| -> Vec<Value> {
        let ran = verify(&["--json", "--engine", engine, "--layouts", THREE]);
        assert!(ran.ok, "{engine}: {}{}", ran.out, ran.err);
        ran.out
            .lines()
            .map(|line| serde_json::from_str(line).expect("an object per line"))
            .collect()
    };
    let threads = rows("threads");
    assert_eq!(threads.len(), 3);
    for (row, (layout, ranks)) in threads.iter().zip(THREE.split("; ").zip([2, 2, 4])) {
        assert_eq!((&row["layout"], &row["ranks"]), (&layout.into(), &ranks.into()), "{row}");
        assert_eq!((&row["ok"], &row["tensor"]), (&true.into(), &Value::Null), "{row}");
        for (error, most) in
            [("loss_rel_err", 2e-5), ("norm_rel_err", 1e-4), ("weight_rel_err", 1e-4)]
        {
            assert!((0.0..=most).contains(&row[error].as_f64().expect("a number")), "{row}");
        }
    }
    // The same sums in the same order, however ranks reach each other.
    assert_eq!(threads, rows("shm"));
    assert_eq!(threads, rows("tcp"));
}

#[test]
fn what_differs_is_an_error_with_the_first_tensor() {
    let ran = verify(&["--layouts", "tensor=2", "--tolerance", "1e-15"]);
    assert!(!ran.ok, "{}", ran.out);
    assert!(ran.out.contains("NO: embed.tokens is "), "{}", ran.out);
    assert!(ran.err.contains("1 of 1 layouts differ from one rank"), "{}", ran.err);

    let ran = verify(&["--layouts", "tensor=2; pipe=2", "--tolerance", "1,1e-15", "--json"]);
    assert!(!ran.ok, "{}", ran.out);
    let rows: Vec<Value> = ran
        .out
        .lines()
        .map(|line| serde_json::from_str(line).expect("an object per line"))
        .collect();
    assert_eq!((&rows[0]["ok"], &rows[0]["tensor"]), (&false.into(), &"embed.tokens".into()));
    // Stages change no sum.
    assert_eq!((&rows[1]["ok"], &rows[1]["weight_rel_err"]), (&true.into(), &0.0.into()));
}

#[test]
fn layouts_that_cannot_be_are_told_together_before_anything_runs() {
    let ran = verify(&["--layouts", "data=2; tensor=3; pipe=4; sequens=true; tensor"]);
    assert!(!ran.ok && ran.out.is_empty(), "{}", ran.out);
    for hint in [
        "tensor=3: 2 errors:",
        "layout.tensor (--layouts): tensor=3 does not divide heads=4; use 2 or 4",
        "pipe=4: layout.pipe (--layouts): pipe=4 stages are more than layers=2",
        "sequens=true: layout.sequens (--layouts): unknown key; did you mean layout.sequence?",
        "tensor: layout (--layouts): `tensor` has no `=`; write for example tensor=2",
    ] {
        assert!(ran.err.contains(hint), "no {hint:?} in:\n{}", ran.err);
    }
    for (words, hint) in [
        (["--layouts", " ; "], "--layouts names none"),
        (["--set", "layout.data=2"], "name them with --layouts"),
        (["--set", "train.lr=-1"], "train.lr (--set): lr must be greater than 0 (got -1)"),
        (["--layouts", "data=3"], "global_batch=8 is not a multiple of data=3"),
        (["--tolerance", "1,2,3"], "--tolerance: one number for losses"),
    ] {
        let ran = verify(&words);
        assert!(!ran.ok && ran.err.contains(hint), "{words:?}: no {hint:?} in:\n{}", ran.err);
    }
}

#[test]
fn unasked_every_kind_of_layout_is_tried() {
    let ran = verify(&["--steps", "1", "--json"]);
    assert!(ran.ok, "{}{}", ran.out, ran.err);
    for word in ["data=4", "tensor=2", "context=2", "pipe=2", "zero=3", "sequence=true", "zb-h2"] {
        assert!(ran.out.contains(word), "no {word} in:\n{}", ran.out);
    }
}
