//! Tests of the binary with its standard output closed, as by `| head`.

mod program;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

const RUN: &str = "[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 6\nglobal_batch = 4\nmicro_batch = 2\n\
                   threads = 1\nlog_every = 1\nsample = \"the \"\nsample_tokens = 8";

/// A directory with only `run.toml` in it.
fn directory(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pipes-{name}"));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target directory is writable");
    fs::write(dir.join("run.toml"), RUN).expect("the target directory is writable");
    dir
}

/// Runs a command whose output is a closed pipe. Returns its exit status and standard error.
fn run_closed(dir: &Path, args: &str) -> (ExitStatus, String) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = program::lockstep();
    command.args(args.split_whitespace()).current_dir(dir).stdout(writer);
    let output = command.output().expect("the binary runs");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn commands_that_only_print_exit_quietly() {
    let dir = directory("print");
    let trained = program::lockstep()
        .args(["train", "run.toml"])
        .current_dir(&dir)
        .output()
        .expect("the binary runs");
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    for args in [
        "data inspect builtin:grammar",
        "generate runs/run --prompt the",
        "generate runs/run --json",
        "export runs/run --to folder",
        "bench gemm --shapes 8x8x8 --seconds 0.01",
    ] {
        let (status, error) = run_closed(&dir, args);
        assert_eq!(status.signal(), Some(libc::SIGPIPE), "{args}: {status}, {error}");
        assert_eq!(error, "", "{args}");
    }
}

#[test]
fn training_continues_with_closed_output() {
    let dir = directory("train");
    for args in [
        "train run.toml --set name=one",
        "train run.toml --set name=threads --engine threads --ranks 2",
        "train run.toml --set name=processes --ranks 2",
    ] {
        let (status, error) = run_closed(&dir, args);
        assert!(status.success() && error.is_empty(), "{args}: {status}, {error}");
    }
    for name in ["one", "threads", "processes"] {
        assert!(dir.join("runs").join(name).join("checkpoints/step-00000006").exists(), "{name}");
    }
    let (status, error) = run_closed(&dir, "bench comm --engine threads --ranks 2 --sizes 4K");
    assert!(status.success() && error.is_empty(), "{status}, {error}");
}
