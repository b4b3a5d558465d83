//! Saves at the end of a run and on signals, and resumes from what they left.

use std::fs;

use crate::workspace::{ENDLESS, Finished, STOPPED, Workspace, finish, signal, wait_until};

#[test]
fn a_second_sigterm_does_not_prevent_the_save() {
    let workspace = Workspace::new("sigterms");
    let args = "train run.toml --ranks 2 --grace 600 --set checkpoint.every=0";
    let running = workspace.start(&format!("{args} {ENDLESS}"), "log");
    workspace.wait_for_step("runs/run", 5);
    let ranks = running.ranks();
    // While one rank is stopped, the others cannot save.
    signal(ranks[1], libc::SIGSTOP);
    signal(running.pid(), libc::SIGTERM);
    wait_until("the first signal", || running.output().contains("the ranks have 600 s to stop"));
    signal(running.pid(), libc::SIGTERM);
    wait_until("the second signal", || running.output().contains("the ranks still have"));
    signal(ranks[1], libc::SIGCONT);
    running.exits(STOPPED);
    assert!(workspace.saved("runs/run") >= 5);
}

#[test]
fn a_grace_period_shorter_than_a_step_is_reported() {
    let workspace = Workspace::new("short-grace");
    let running = workspace.start(&format!("train run.toml --ranks 2 --grace 0 {ENDLESS}"), "log");
    wait_until("the warning", || running.output().contains("before they have saved; set --grace "));
}

#[test]
fn only_corrupt_checkpoints_end_the_run_at_once() {
    let workspace = Workspace::new("all-corrupt");
    workspace.run("train run.toml --ranks 2 --set train.steps=20");
    let run = workspace.0.join("runs/run");
    for step in lockstep_ckpt::steps(&run) {
        let path = lockstep_ckpt::folder(&run, step).join("rank-00001.safetensors");
        let mut bytes = fs::read(&path).expect("a file per rank");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).expect("it is writable");
    }
    let args = "train run.toml --ranks 2 --resume=if-any";
    let Finished { code, output } = finish(workspace.lockstep(args).output());
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("no checkpoint in runs/run can be loaded (2 tried)"), "{output}");
    assert!(output.contains("not restarting: the error is permanent"), "{output}");
    assert!(!output.contains("restarting (restart"), "{output}");
}

/// Trains on a file system with too little space for a checkpoint, which is freed when the final save has failed.
const FULL_AT_THE_END: &str = r#"
mkdir -p disk && mount -t tmpfs -o size=1m none disk || exit 77
cd disk
cat /dev/zero > ballast 2> /dev/null
truncate -s -98304 ballast
"$LOCKSTEP" train ../run.toml --ranks 2 --set train.steps=10 --set checkpoint.every=0 > output 2> ../errors &
run=$!
until grep -q 'is retried' ../errors || ! kill -0 $run; do sleep 0.02; done
rm ballast
wait $run
code=$?
cp -r runs ..
exit $code
"#;

#[test]
fn a_final_save_waits_for_space_instead_of_training_again() {
    let workspace = Workspace::new("full-at-the-end");
    let Some(Finished { code, output }) = workspace.run_with_mounts(FULL_AT_THE_END) else {
        return;
    };
    let errors = fs::read_to_string(workspace.0.join("errors")).expect("the run was started");
    assert_eq!(code, Some(0), "{output}{errors}");
    let message = "No space left on device (os error 28); the training state is kept in memory";
    assert!(errors.contains(message), "{errors}");
    assert!(!errors.contains("restarting"), "{errors}");
    workspace.assert_undisturbed("runs/run", "train run.toml --ranks 2");
}
