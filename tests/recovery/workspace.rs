//! A directory with a run file, and trainings that run in it.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use lockstep_ckpt::Tensors;

const RUN: &str = r#"
name = "run"
[model]
preset = "gpt2-test"
[train]
steps = 60
global_batch = 8
micro_batch = 1
lr = 1e-2
schedule = "constant"
warmup = 2
threads = 1
log_every = 1
[checkpoint]
every = 10
keep = 2
"#;

pub const ENDLESS: &str = "--set train.steps=10000000";

/// Exit code of a run that stopped on request.
pub const STOPPED: i32 = 75;

/// A directory with a run file, in which commands run.
pub struct Workspace(pub PathBuf);

impl Workspace {
    pub fn new(name: &str) -> Workspace {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("recovery-{name}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("the target directory is writable");
        fs::write(dir.join("run.toml"), RUN).expect("the target directory is writable");
        Workspace(dir)
    }

    pub fn lockstep(&self, args: &str) -> Command {
        self.command(env!("CARGO_BIN_EXE_lockstep"), args)
    }

    pub fn command(&self, program: &str, args: &str) -> Command {
        let mut command = Command::new(program);
        crate::signals::restore(&mut command);
        crate::program::choose_device(&mut command);
        command.args(args.split_whitespace()).current_dir(&self.0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a shell script that may mount file systems and finds the binary in `$LOCKSTEP`. Returns `None` if mounting is
    /// not allowed here.
    pub fn run_with_mounts(&self, script: &str) -> Option<Finished> {
        let run = |script| {
            let mut command = self.command("unshare", "--map-root-user --mount sh -c");
            finish(command.arg(script).env("LOCKSTEP", env!("CARGO_BIN_EXE_lockstep")).output())
        };
        if run("mkdir -p disk && mount -t tmpfs none disk").code != Some(0) {
            eprintln!("skipped: file systems cannot be mounted here");
            return None;
        }
        Some(run(script))
    }

    /// Starts a training in the background, with its output in a file.
    pub fn start(&self, args: &str, log: &str) -> Running {
        let file = fs::File::create(self.0.join(log)).expect("the directory is writable");
        let mut command = self.lockstep(args);
        command.stdout(file.try_clone().expect("a second handle")).stderr(file);
        Running { child: command.spawn().expect("the binary starts"), log: self.0.join(log) }
    }

    /// Runs a command to its successful end and returns its output.
    #[track_caller]
    pub fn run(&self, args: &str) -> String {
        let finished = finish(self.lockstep(args).output());
        assert_eq!(finished.code, Some(0), "{args}:\n{}", finished.output);
        finished.output
    }

    /// The last step in metrics.jsonl.
    pub fn step(&self, run: &str) -> u64 {
        let text = fs::read_to_string(self.0.join(run).join("metrics.jsonl")).unwrap_or_default();
        let mut steps = text.lines().filter_map(|line| {
            serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64()
        });
        steps.next_back().unwrap_or(0)
    }

    #[track_caller]
    pub fn wait_for_step(&self, run: &str, step: u64) {
        wait_until(&format!("step {step} of {run}"), || self.step(run) >= step);
    }

    /// The step of the newest checkpoint.
    pub fn saved(&self, run: &str) -> u64 {
        lockstep_ckpt::steps(&self.0.join(run)).first().copied().unwrap_or(0)
    }

    #[track_caller]
    pub fn wait_for_checkpoint_after(&self, run: &str, step: u64) {
        wait_until(&format!("a checkpoint of {run} after step {step}"), || self.saved(run) > step);
    }

    /// Compares `run`, which was interrupted, with an undisturbed run of as many steps: the same bits, and every step
    /// reported once.
    #[track_caller]
    pub fn assert_undisturbed(&self, run: &str, args: &str) {
        let steps = self.saved(run);
        let _ = fs::remove_dir_all(self.0.join("runs/whole"));
        self.run(&format!("{args} --set name=whole --set train.steps={steps}"));
        for ((name, one), (_, other)) in self.weights(run).iter().zip(&self.weights("runs/whole")) {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(one), bits(other), "{name} after step {steps}");
        }
        self.assert_reported_once(run);
    }

    #[track_caller]
    pub fn assert_reported_once(&self, run: &str) {
        let reports = lockstep_events::read(&self.0.join(run).join("metrics.jsonl"));
        let reports = reports.expect("valid lines");
        let steps: Vec<usize> =
            reports.iter().filter(|line| line.loss.is_some()).map(|line| line.step).collect();
        assert_eq!(steps, (1..=self.saved(run) as usize).collect::<Vec<_>>(), "{run}");
    }

    /// The parameters of the newest checkpoint.
    pub fn weights(&self, run: &str) -> Vec<(String, Vec<f32>)> {
        let newest = lockstep_ckpt::find(&self.0.join(run)).expect("a checkpoint");
        let checkpoint = lockstep_ckpt::load(&newest).expect("a valid checkpoint");
        let params = checkpoint.params();
        let read = |named: &lockstep_ckpt::Named| {
            let mut values = vec![0.0; named.len()];
            params.read(&named.name, &mut values).expect("valid files");
            (named.name.clone(), values)
        };
        params.list().iter().map(read).collect()
    }
}

/// A training in the background.
pub struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The process ids of its ranks, in order.
    pub fn ranks(&self) -> Vec<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Waits until `count` ranks run and none of them is one of `before`.
    #[track_caller]
    pub fn wait_for_ranks(&self, count: usize, before: &[u32]) -> Vec<u32> {
        let mut ranks = vec![];
        wait_until(&format!("{count} new ranks"), || {
            ranks = self.ranks();
            ranks.len() == count && ranks.iter().all(|pid| !before.contains(pid))
        });
        ranks
    }

    #[track_caller]
    pub fn exits(mut self, code: i32) -> String {
        let status = self.child.wait().expect("the launcher is a child");
        let output = self.output();
        assert_eq!(status.code(), Some(code), "{status}:\n{output}");
        output
    }

    /// Asks the run to save and stop, and returns its output.
    #[track_caller]
    pub fn stop(self) -> String {
        signal(self.pid(), libc::SIGTERM);
        self.exits(STOPPED)
    }
}

impl Drop for Running {
    /// Kills a run that a failed test left behind; its ranks die with it.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Finished {
    pub code: Option<i32>,
    pub output: String,
}

pub fn finish(output: std::io::Result<Output>) -> Finished {
    let Output { status, stdout, stderr } = output.expect("the binary starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Finished { code: status.code(), output: text(&stdout) + &text(&stderr) }
}

/// Waits for a condition. The limit only keeps a broken test from hanging.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(600);
    while !condition() {
        assert!(Instant::now() < limit, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn signal(pid: u32, signal: i32) {
    // SAFETY: kill accesses no memory; the process is a child of this test or of its child, and not yet reaped.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0, "signalling {pid}");
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("a bound socket").port()
}
