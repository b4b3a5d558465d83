//! Sets `LOCKSTEP_VERSION`: the version of the package, with the commit if it is built from a git checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    let version = env!("CARGO_PKG_VERSION");
    let version = match commit() {
        Some(commit) => format!("{version} ({commit})"),
        None => version.to_string(),
    };
    println!("cargo::rustc-env=LOCKSTEP_VERSION={version}");
    println!("cargo::rerun-if-changed=build.rs");
}

/// The checked-out commit. None without git, or if the sources are a part of another repository.
fn commit() -> Option<String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != here.canonicalize().ok()? {
        return None;
    }
    // A commit appends to the log of HEAD, a checkout too.
    let log = here.join(git(&["rev-parse", "--git-path", "logs/HEAD"])?);
    if log.exists() {
        println!("cargo::rerun-if-changed={}", log.display());
    }
    git(&["rev-parse", "--short=10", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let directory = env!("CARGO_MANIFEST_DIR");
    let output = Command::new("git").args(args).current_dir(directory).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}
