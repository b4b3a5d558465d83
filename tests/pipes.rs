//! Output that nobody reads, as after `| head`: the real binary writes to a pipe whose other end is closed.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

const RUN: &str = "[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 6\nglobal_batch = 4\nmicro_batch = 2\n\
                   threads = 1\nlog_every = 1\nsample = \"the \"\nsample_tokens = 8";

/// An empty folder with `run.toml` in it.
fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pipes-{name}"));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target folder can be written");
    fs::write(dir.join("run.toml"), RUN).expect("the target folder can be written");
    dir
}

/// Without a reader: how it ended, and what it said on standard error.
fn unread(dir: &Path, words: &str) -> (ExitStatus, String) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    command.args(words.split_whitespace()).current_dir(dir).stdout(writer);
    let output = command.output().expect("the binary runs");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn commands_that_only_print_end_quietly_with_their_reader() {
    let dir = folder("print");
    let trained = Command::new(env!("CARGO_BIN_EXE_lockstep"))
        .args(["train", "run.toml"])
        .current_dir(&dir)
        .output()
        .expect("the binary runs");
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    for words in [
        "data inspect builtin:grammar",
        "generate runs/run --prompt the",
        "generate runs/run --json",
        "export runs/run --to folder",
        "bench gemm --shapes 8x8x8 --seconds 0.01",
    ] {
        let (status, told) = unread(&dir, words);
        assert_eq!(status.signal(), Some(libc::SIGPIPE), "{words}: {status}, {told}");
        assert_eq!(told, "", "{words}");
    }
}

#[test]
fn training_goes_on_without_a_reader() {
    let dir = folder("train");
    for words in [
        "train run.toml --set name=one",
        "train run.toml --set name=threads --engine threads --ranks 2",
        "train run.toml --set name=processes --ranks 2",
    ] {
        let (status, told) = unread(&dir, words);
        assert!(status.success() && told.is_empty(), "{words}: {status}, {told}");
    }
    for name in ["one", "threads", "processes"] {
        assert!(dir.join("runs").join(name).join("checkpoints/step-00000006").exists(), "{name}");
    }
    let (status, told) = unread(&dir, "bench comm --engine threads --ranks 2 --sizes 4K");
    assert!(status.success() && told.is_empty(), "{status}, {told}");
}
