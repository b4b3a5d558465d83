//! The program under test.

#![allow(dead_code)] // not every test binary uses all of it

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The program, on the device of [`choose_device`].
pub fn lockstep() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    choose_device(&mut command);
    command
}

/// Lets a command compute on the CPU unless `LOCKSTEP_DEVICE` names another device. Results must not depend on whether
/// the machine has a GPU.
pub fn choose_device(command: &mut Command) {
    if std::env::var_os("LOCKSTEP_DEVICE").is_none() {
        command.env("LOCKSTEP_DEVICE", "cpu");
    }
}

/// An empty directory for a test.
pub fn empty_directory(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("the target directory is writable");
    dir
}

/// Runs the program in a directory.
pub fn run_in(dir: &Path, args: &[&str]) -> Output {
    lockstep().args(args).current_dir(dir).output().expect("the binary runs")
}

/// Standard output of a command that must succeed.
#[track_caller]
pub fn output(dir: &Path, args: &[&str]) -> String {
    let run = run_in(dir, args);
    assert!(run.status.success(), "{args:?}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).expect("text")
}
