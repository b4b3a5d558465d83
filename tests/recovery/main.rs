//! Recovery from failures: the real binary, with ranks, launchers and hosts that are killed, stopped or restarted.
//!
//! Runs that are to be interrupted have no end in sight (`ENDLESS`), so that no test races against their end. When the
//! test has seen what it waits for, it stops the run with SIGTERM, and an undisturbed run takes the same number of
//! steps.

mod learner;
#[path = "../program/mod.rs"]
mod program;
mod saving;
mod second_start;
#[path = "../signals/mod.rs"]
mod signals;
mod workspace;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use workspace::{ENDLESS, Finished, STOPPED, Workspace, finish, free_port, signal, wait_until};

#[test]
fn a_killed_rank_does_not_change_the_result() {
    let workspace = Workspace::new("killed");
    for layout in ["data=2", "data=2 --set layout.zero=3", "tensor=2"] {
        let args = format!("train run.toml --ranks 2 --set layout.{layout}");
        let running = workspace.start(&format!("{args} {ENDLESS}"), "log");
        workspace.wait_for_checkpoint_after("runs/run", 0);
        for rank in [1, 0] {
            let ranks = running.ranks();
            assert_eq!(ranks.len(), 2, "{ranks:?}: {}", running.output());
            signal(ranks[rank], libc::SIGKILL);
            running.wait_for_ranks(2, &ranks);
            // The launcher has seen this checkpoint at most.
            workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
        }
        let output = running.stop();
        for rank in [0, 1] {
            let failure = format!("rank {rank} failed first: it was killed by SIGKILL");
            assert!(output.contains(&failure), "{output}");
        }
        // There was a new checkpoint before the second failure, so both count as the first restart.
        assert_eq!(output.matches("restart 1 of at most 3").count(), 2, "{output}");
        workspace.assert_undisturbed("runs/run", &args);
        fs::remove_dir_all(workspace.0.join("runs/run")).expect("the run's folder");
    }
}

#[test]
fn a_killed_launcher_is_restarted_by_the_same_command() {
    let workspace = Workspace::new("launcher");
    let args = "train run.toml --ranks 2 --resume=if-any";
    for _ in 0..2 {
        let running = workspace.start(&format!("{args} {ENDLESS}"), "log");
        workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
        let ranks = running.ranks();
        assert_eq!(ranks.len(), 2, "{ranks:?}: {}", running.output());
        signal(running.pid(), libc::SIGKILL);
        drop(running);
        wait_until("ranks die with their launcher", || {
            ranks.iter().all(|pid| !Path::new(&format!("/proc/{pid}/exe")).exists())
        });
    }
    let running = workspace.start(&format!("{args} {ENDLESS}"), "log");
    workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
    running.stop();
    workspace.assert_undisturbed("runs/run", args);
    // A finished run is not repeated.
    let steps = workspace.saved("runs/run");
    let output = workspace.run(&format!("{args} --set train.steps={steps}"));
    assert!(!output.contains("saved"), "{output}");
}

#[test]
fn a_signal_saves_and_the_run_resumes_later() {
    let workspace = Workspace::new("signals");
    let args = "train run.toml --ranks 2 --resume=if-any";
    // No checkpoint is due, so all of them are caused by signals.
    let endless = format!("{args} {ENDLESS} --set checkpoint.every=0");
    for number in [libc::SIGTERM, libc::SIGINT] {
        let running = workspace.start(&endless, "log");
        let saved = workspace.saved("runs/run");
        workspace.wait_for_step("runs/run", saved + 10);
        signal(running.pid(), number);
        let output = running.exits(STOPPED);
        assert!(output.contains("stopped after step"), "{output}");
        assert!(workspace.saved("runs/run") >= saved + 10, "{output}");
    }
    // A signal to a single rank stops all ranks.
    let running = workspace.start(&endless, "log");
    workspace.wait_for_step("runs/run", workspace.saved("runs/run") + 10);
    signal(running.ranks()[1], libc::SIGTERM);
    running.exits(STOPPED);
    workspace.assert_undisturbed("runs/run", args);
}

/// Stops processes with SIGSTOP while none of them holds the lock on the run's generation.
fn freeze(pids: &[u32], run: &Path) {
    wait_until("no process holds the lock", || {
        pids.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
        let stopped = |pid: &u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.contains("State:\tT")
        };
        wait_until("all processes are stopped", || pids.iter().all(stopped));
        let lock = fs::File::open(run.join("generation")).expect("the run has a generation");
        let free = lock.try_lock().is_ok();
        if !free {
            pids.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
        }
        free
    });
}

/// A launcher and its ranks hang, as on a frozen host, while another launcher takes over the run.
#[test]
fn a_launcher_that_was_replaced_is_rejected() {
    let workspace = Workspace::new("replaced");
    let args = "train run.toml --ranks 2 --resume=if-any";
    let old = workspace.start(&format!("{args} {ENDLESS}"), "old");
    workspace.wait_for_checkpoint_after("runs/run", 0);
    let pids = [vec![old.pid()], old.ranks()].concat();
    freeze(&pids, &workspace.0.join("runs/run"));
    // What the message of a refused start suggests for a launcher that hangs.
    fs::remove_file(workspace.0.join("runs/run/lock")).expect("the run is locked");
    let new = workspace.start(&format!("{args} {ENDLESS}"), "new");
    wait_until("the new launcher takes steps", || {
        new.output().lines().any(|line| line.starts_with("step "))
    });
    pids.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
    let output = old.exits(1);
    assert!(output.contains("generation 1") && output.contains("generation 2"), "{output}");
    new.stop();
    workspace.assert_undisturbed("runs/run", args);
}

#[test]
fn a_signal_without_time_to_save_gives_another_exit_code() {
    let workspace = Workspace::new("grace");
    let running = workspace.start(&format!("train run.toml --ranks 2 --grace 0 {ENDLESS}"), "log");
    workspace.wait_for_step("runs/run", 5);
    // The ranks cannot save while one of them is stopped.
    signal(running.ranks()[1], libc::SIGSTOP);
    signal(running.pid(), libc::SIGTERM);
    running.exits(143);
}

#[test]
fn a_single_rank_is_restarted() {
    let workspace = Workspace::new("single");
    let running = workspace.start(&format!("train run.toml {ENDLESS}"), "log");
    workspace.wait_for_checkpoint_after("runs/run", 0);
    let ranks = running.ranks();
    signal(ranks[0], libc::SIGKILL);
    running.wait_for_ranks(1, &ranks);
    workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
    running.stop();
    workspace.assert_undisturbed("runs/run", "train run.toml");
}

#[test]
fn repeated_and_permanent_failures_end_the_run() {
    let workspace = Workspace::new("repeated");
    // There are no checkpoints, so restarts make no progress.
    let args = "train run.toml --ranks 2 --max-restarts 1 --set checkpoint.every=0";
    let running = workspace.start(&format!("{args} {ENDLESS}"), "log");
    workspace.wait_for_step("runs/run", 3);
    let ranks = running.ranks();
    signal(ranks[0], libc::SIGKILL);
    let ranks = running.wait_for_ranks(2, &ranks);
    signal(ranks[0], libc::SIGKILL);
    let output = running.exits(137);
    assert!(output.contains("giving up after 1 restart without a new checkpoint"), "{output}");
    // A permanent error is not retried.
    let args = "train run.toml --ranks 2 --set name=diverging --set train.lr=1e30 \
                --set train.clip=0 --set train.warmup=0";
    let Finished { code, output } = finish(workspace.lockstep(args).output());
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("not restarting: the error is permanent"), "{output}");
    assert!(!output.contains("restarting (restart"), "{output}");
}

#[test]
fn ranks_that_differ_are_reported_before_the_first_step() {
    let workspace = Workspace::new("differ");
    let program = env!("CARGO_BIN_EXE_lockstep");
    let other = workspace.0.join("other");
    let mut bytes = fs::read(program).expect("the binary");
    bytes.push(0);
    fs::write(&other, bytes).expect("the directory is writable");
    fs::set_permissions(&other, fs::metadata(program).expect("the binary").permissions())
        .expect("the directory is writable");
    let other = other.display();
    for (script, hints) in [
        (
            format!("exec {program} train run.toml --set train.lr=0.0$((RANK+1))"),
            [
                "rank 1 (on host ",
                "has train.lr.min = 0.02, rank 0",
                "has 0.01; use the same run file",
            ],
        ),
        (
            format!("[ $RANK = 0 ] && exec {program} train run.toml; exec {other} train run.toml"),
            ["rank 1 (on host ", "has program = blake3 ", "; run the same build on every host"],
        ),
    ] {
        // Both ranks get time to report.
        let mut command =
            workspace.lockstep("launch --nproc-per-node 2 --tee --grace 600 -- sh -c");
        let Finished { code, output } = finish(command.arg(script).output());
        assert_eq!(code, Some(78), "{output}");
        for hint in hints {
            for rank in ["[0] ", "[1] "] {
                let reported = |line: &str| line.starts_with(rank) && line.contains(hint);
                assert!(output.lines().any(reported), "no {hint:?} by {rank}in:\n{output}");
            }
        }
        assert!(!workspace.0.join("runs/run/metrics.jsonl").exists(), "a step was taken");
    }
}

#[test]
fn losing_and_regaining_a_host_changes_only_the_number_of_ranks() {
    let workspace = Workspace::new("hosts");
    let token = workspace.0.join("token");
    fs::write(&token, "0123456789abcdef".repeat(4)).expect("it is writable");
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).expect("our own file");
    // A small learning rate keeps differences from rounding small.
    let args = "train run.toml --set layout.data=4 --set train.lr=1e-4 --set checkpoint.every=20";
    let port = free_port();
    let node = |index: usize| {
        let args = format!(
            "{args} {ENDLESS} --nnodes 2 --node-rank {index} --master-addr 127.0.0.1 \
             --master-port {port} --token-file token --min-ranks 2 --max-ranks 4 --wait 1"
        );
        workspace.start(&args, &format!("log-{index}"))
    };
    let (first, second) = (node(0), node(1));
    workspace.wait_for_checkpoint_after("runs/run", 0);
    assert_eq!((first.ranks().len(), second.ranks().len()), (2, 2));
    // A host is lost, and the other continues.
    signal(second.pid(), libc::SIGKILL);
    drop(second);
    wait_until("two ranks", || first.output().contains("continuing with 2 of 4 ranks"));
    workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
    // It returns and takes part again.
    let second = node(1);
    second.wait_for_ranks(2, &[]);
    workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
    let output = first.stop();
    second.exits(STOPPED);
    assert!(output.contains("lost node 1 ("), "{output}");
    let growth = "4 ranks are available: stopping 2 ranks to continue with 4";
    assert!(output.contains(growth), "{output}");
    workspace.assert_reported_once("runs/run");

    let steps = workspace.saved("runs/run");
    workspace.run(&format!("{args} --set name=whole --set train.steps={steps}"));
    // Compared over all parameters together: some, such as the key biases, change only by rounding.
    let (run, whole) = (workspace.weights("runs/run"), workspace.weights("runs/whole"));
    let (mut difference, mut norm) = (0.0, 0.0);
    for ((name, one), (other_name, other)) in run.iter().zip(&whole) {
        assert_eq!((name, one.len()), (other_name, other.len()));
        difference += one.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        norm += other.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
    }
    let relative = (difference / norm).sqrt();
    assert!(relative <= 1e-3, "{relative} after {steps} steps");
    assert!(relative > 0.0, "with another number of ranks, sums are rounded differently");
}

/// Trains on a small file system that is filled after the first checkpoint and freed after a save has failed. The
/// output is written to that file system too.
const FULL_DISK: &str = r#"
mkdir -p disk && mount -t tmpfs -o size=2m none disk || exit 77
cd disk
"$LOCKSTEP" train ../run.toml --ranks 2 --set train.steps=10000000 > output 2> ../errors &
run=$!
newest() { ls runs/run/checkpoints 2> /dev/null | grep '^step-[0-9]*$' | tail -n 1; }
until [ -n "$(newest)" ] || ! kill -0 $run; do sleep 0.02; done
cat /dev/zero > ballast 2> /dev/null
until grep -q 'checkpoint.*No space left on device' ../errors || ! kill -0 $run; do sleep 0.02; done
rm ballast
before=$(newest)
until [ "$(newest)" != "$before" ] || ! kill -0 $run; do sleep 0.02; done
kill $run
wait $run
code=$?
cp -r runs ..
exit $code
"#;

#[test]
fn a_full_disk_prevents_a_save_but_does_not_stop_the_run() {
    let workspace = Workspace::new("full");
    let Some(Finished { code, output }) = workspace.run_with_mounts(FULL_DISK) else { return };
    let errors = fs::read_to_string(workspace.0.join("errors")).expect("the run was started");
    assert_eq!(code, Some(STOPPED), "{output}{errors}");
    assert!(errors.contains("No space left on device"), "{errors}");
    // Reports are complete except while the disk was full.
    let reports = lockstep_events::read(&workspace.0.join("runs/run/metrics.jsonl"));
    let last = reports.expect("valid lines").last().map(|line| line.step as u64);
    assert_eq!(last, Some(workspace.saved("runs/run")));
    let steps = workspace.saved("runs/run");
    workspace.run(&format!("train run.toml --ranks 2 --set name=whole --set train.steps={steps}"));
    assert_eq!(workspace.weights("runs/run"), workspace.weights("runs/whole"));
    // Output to a full disk does not stop a run either.
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").expect("the device exists");
    let mut silent = workspace.lockstep("train run.toml --ranks 2 --set name=silent");
    let status = silent.stdout(full()).stderr(full()).status().expect("the binary starts");
    assert!(status.success(), "{status}");
}
