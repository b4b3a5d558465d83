//! A directory with a run file, in which commands run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use lockstep_events::{StepReport, read};
use lockstep_plan::Plan;

/// Run file of a model with a few thousand parameters on the built-in grammar. Tests override keys.
pub const SMALL: &str = r#"
name = "small"
[model]
preset = "gpt2-test"
[train]
steps = 10
global_batch = 8
micro_batch = 2
lr = 1e-2
warmup = 2
threads = 1
log_every = 1
eval_every = 5
eval_batches = 1
[checkpoint]
every = 4
keep = 2
"#;

/// A directory with `small.toml`, in which commands run.
pub struct Workspace(PathBuf);

pub struct Finished {
    pub ok: bool,
    pub out: String,
    pub err: String,
}

impl Workspace {
    pub fn new(name: &str) -> Workspace {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("train-{name}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("the target directory is writable");
        let workspace = Workspace(dir);
        workspace.write("small.toml", SMALL);
        workspace
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).expect("the directory is writable");
    }

    pub fn run(&self, args: &str) -> Finished {
        self.run_with(args, &[])
    }

    /// Runs a command with environment variables.
    pub fn run_with(&self, args: &str, variables: &[(&str, &str)]) -> Finished {
        let mut command = crate::program::lockstep();
        let Output { status, stdout, stderr } = command
            .args(args.split_whitespace())
            .envs(variables.iter().copied())
            .current_dir(&self.0)
            .output()
            .expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Finished { ok: status.success(), out: text(stdout), err: text(stderr) }
    }

    /// Runs a command that must succeed and returns its standard output.
    #[track_caller]
    pub fn output(&self, args: &str) -> String {
        let finished = self.run(args);
        assert!(finished.ok, "{args}:\n{}{}", finished.out, finished.err);
        finished.out
    }

    /// Runs a command that must fail with an error that contains all `parts`.
    #[track_caller]
    pub fn assert_fails(&self, args: &str, parts: &[&str]) {
        let finished = self.run(args);
        assert!(!finished.ok, "{args}:\n{}", finished.out);
        for part in parts {
            assert!(finished.err.contains(part), "{args}: no {part:?} in:\n{}", finished.err);
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Asserts that a file exists and is not empty.
    #[track_caller]
    pub fn assert_file(&self, name: &str) {
        let size = fs::metadata(self.path(name)).map(|file| file.len());
        assert!(size.as_ref().is_ok_and(|size| *size > 0), "{name}: {size:?}");
    }

    /// The sorted names in a folder.
    #[track_caller]
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).expect("a folder").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    #[track_caller]
    pub fn metrics(&self, run: &str) -> Vec<StepReport> {
        read(&self.path(run).join("metrics.jsonl")).expect("complete lines")
    }

    /// Step and loss of each line of metrics.jsonl.
    #[track_caller]
    pub fn losses(&self, run: &str) -> Vec<(usize, f64)> {
        let metrics = self.metrics(run);
        metrics.iter().filter_map(|line| Some((line.step, line.loss?))).collect()
    }

    #[track_caller]
    pub fn plan(&self, run: &str) -> Plan {
        let text = fs::read_to_string(self.path(run).join("plan.json")).expect("plan.json exists");
        serde_json::from_str(&text).expect("a valid plan")
    }
}

#[track_caller]
pub fn assert_same_losses(label: &str, one: &[(usize, f64)], other: &[(usize, f64)]) {
    assert_eq!(one.len(), other.len(), "{label}");
    for ((step, one), (other_step, other)) in one.iter().zip(other) {
        assert_eq!(step, other_step, "{label}");
        assert!((one / other - 1.0).abs() < 2e-5, "{label}, step {step}: {one} and {other}");
    }
}
