//! The online learner of `examples/learner`, killed and restarted.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[path = "../../examples/learner/main.rs"]
mod example;

use example::{Job, Kill};

/// The learner process: this test binary, started by the test below.
#[test]
fn learner_process() {
    if let Some(settings) = example::settings() {
        example::learn(&settings).expect("the learner finishes");
    }
}

#[test]
fn every_rollout_is_used_once_although_the_learner_is_killed_twenty_times() {
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("learner");
    let _ = fs::remove_dir_all(&parent);
    fs::create_dir_all(&parent).expect("the target directory is writable");
    // Between two checkpoints, around a save, and after one, in turn.
    let kill = |number: u64| match number % 3 {
        0 => Kill::AfterUpdate(2 * number + 1),
        1 => Kill::AfterUpdate(2 * number + 2),
        _ => Kill::AfterSave(2 * number + 2),
    };
    let kills: Vec<Kill> = (0..20).map(kill).collect();
    let start = || {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "learner::learner_process"]).stdout(Stdio::null());
        Ok(command)
    };
    let job = Job { updates: 42, save_every: 2, batch: 16, folder: &parent.join("run") };
    let state = job.run(&kills, start).expect("the learner finishes");
    assert_eq!(state.ledger.policy_version(), 42);
    assert_eq!(fs::read_dir(&parent).expect("it exists").count(), 0, "something is left");
}
