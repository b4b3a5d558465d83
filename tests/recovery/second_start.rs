//! Launchers that must not disturb a run: second starts, duplicates, and launchers of other runs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::workspace::{
    ENDLESS, Finished, Running, STOPPED, Workspace, finish, free_port, wait_until,
};

#[test]
fn a_second_start_of_a_running_run_is_refused() {
    let workspace = Workspace::new("twice");
    let running = workspace.start(&format!("train run.toml --ranks 2 {ENDLESS}"), "log");
    workspace.wait_for_step("runs/run", 5);
    for (engine, resume) in [("shm", ""), ("shm", "--resume=if-any"), ("threads", "")] {
        let args = format!("train run.toml --ranks 2 --engine {engine} {resume}");
        let Finished { code, output } = finish(workspace.lockstep(&args).output());
        assert_eq!(code, Some(1), "{args}: {output}");
        let holder = format!("runs/run is in use by process {} on host ", running.pid());
        assert!(output.contains(&holder), "{args}: {output}");
    }
    assert!(!workspace.0.join("runs/run.1").exists(), "the run was renamed");
    workspace.wait_for_checkpoint_after("runs/run", workspace.saved("runs/run"));
    running.stop();
    workspace.assert_undisturbed("runs/run", "train run.toml --ranks 2");
    // After its end the run may be replaced.
    workspace.run("train run.toml --ranks 2 --set train.steps=2");
    assert!(workspace.0.join("runs/run.1").exists());
    let left = |run: &str| workspace.0.join(run).join("lock").exists();
    assert!(!left("runs/run") && !left("runs/run.1"));
}

/// A job of two nodes with one rank each.
struct Job {
    workspace: Workspace,
    port: u16,
}

impl Job {
    fn new(name: &str) -> Job {
        let workspace = Workspace::new(name);
        let token = workspace.0.join("token");
        fs::write(&token, "0123456789abcdef".repeat(4)).expect("it is writable");
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(&token, private).expect("it is our file");
        Job { workspace, port: free_port() }
    }

    fn node(&self, index: usize, options: &str, log: &str) -> Running {
        let args = format!(
            "train run.toml --ranks 2 {ENDLESS} --nnodes 2 --node-rank {index} --master-addr 127.0.0.1 \
             --master-port {} --token-file token {options}",
            self.port
        );
        self.workspace.start(&args, log)
    }
}

#[test]
fn a_duplicate_of_a_node_does_not_replace_it() {
    let job = Job::new("duplicate");
    let (first, second) = (job.node(0, "", "log-0"), job.node(1, "", "log-1"));
    job.workspace.wait_for_step("runs/run", 5);
    let ranks = second.ranks();
    let duplicate = job.node(1, "", "log-2");
    let refused = format!("refused process {} on host ", duplicate.pid());
    wait_until("the duplicate is refused", || first.output().contains(&refused));
    let holder = format!("node rank 1 is in use by process {} on host ", second.pid());
    assert!(first.output().contains(&holder), "{}", first.output());
    wait_until("the duplicate knows it", || duplicate.output().contains(&holder));
    job.workspace.wait_for_checkpoint_after("runs/run", job.workspace.saved("runs/run"));
    assert_eq!(second.ranks(), ranks, "the ranks were not restarted");
    // When the node leaves, the duplicate takes its place.
    drop(second);
    duplicate.wait_for_ranks(1, &[]);
    job.workspace.wait_for_checkpoint_after("runs/run", job.workspace.saved("runs/run"));
    let output = first.stop();
    duplicate.exits(STOPPED);
    assert!(!output.contains("memory ran out"), "{output}");
    job.workspace.assert_undisturbed("runs/run", "train run.toml --ranks 2");
}

#[test]
fn a_node_of_another_run_is_rejected() {
    let job = Job::new("stranger");
    let (first, second) = (job.node(0, "", "log-0"), job.node(1, "", "log-1"));
    job.workspace.wait_for_step("runs/run", 5);
    for other in ["--set name=other", "--set train.lr=0.5"] {
        let output = job.node(1, other, "log-2").exits(1);
        assert!(output.contains("trains another run"), "{output}");
    }
    first.stop();
    second.exits(STOPPED);
    job.workspace.assert_undisturbed("runs/run", "train run.toml --ranks 2");
}
