//! `failures.jsonl` next to the logs of the ranks: the first failure of each generation, for tools that read a run later.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::spec::Failure;

/// Name of the file in the log directory.
pub const FAILURES: &str = "failures.jsonl";

/// Appends a failure. A full disk must not hide the failure itself, so errors are ignored.
pub(crate) fn append(failure: &Failure) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let line = json!({
        "rank": failure.rank,
        "generation": failure.generation,
        "exit": failure.exit.to_string(),
        "code": failure.exit.code(),
        "oom_kills": failure.oom_kills,
        "tail": failure.tail,
        "time": now.as_secs(),
    });
    let path = failure.log.with_file_name(FAILURES);
    let file = OpenOptions::new().create(true).append(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
}
