//! A folder of its own for a test, and the program in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lockstep_events::{StepReport, read};
use lockstep_plan::Plan;

/// A few thousand parameters on the built-in grammar. Tests add what they are about.
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

/// A folder of its own for a test, and the program in it.
pub struct Desk(PathBuf);

pub struct Ran {
    pub ok: bool,
    pub out: String,
    pub err: String,
}

impl Desk {
    /// With `small.toml` in it.
    pub fn new(name: &str) -> Desk {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("train-{name}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("the target folder can be written");
        let desk = Desk(dir);
        desk.write("small.toml", SMALL);
        desk
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).expect("the test's folder can be written");
    }

    pub fn run(&self, words: &str) -> Ran {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        let Output { status, stdout, stderr } = command
            .args(words.split_whitespace())
            .current_dir(&self.0)
            .output()
            .expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Ran { ok: status.success(), out: text(stdout), err: text(stderr) }
    }

    /// What the program prints when all is well.
    #[track_caller]
    pub fn done(&self, words: &str) -> String {
        let ran = self.run(words);
        assert!(ran.ok, "{words}:\n{}{}", ran.out, ran.err);
        ran.out
    }

    /// It fails, and says all of this.
    #[track_caller]
    pub fn refused(&self, words: &str, hints: &[&str]) {
        let ran = self.run(words);
        assert!(!ran.ok, "{words}:\n{}", ran.out);
        for hint in hints {
            assert!(ran.err.contains(hint), "{words}: no {hint:?} in:\n{}", ran.err);
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    #[track_caller]
    pub fn has(&self, name: &str) {
        let size = fs::metadata(self.path(name)).map(|file| file.len());
        assert!(size.as_ref().is_ok_and(|size| *size > 0), "{name}: {size:?}");
    }

    /// The names in a folder, in order.
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
        read(&self.path(run).join("metrics.jsonl")).expect("whole lines")
    }

    /// The loss of each step, in the order of the file.
    #[track_caller]
    pub fn losses(&self, run: &str) -> Vec<(usize, f64)> {
        let metrics = self.metrics(run);
        metrics.iter().filter_map(|line| Some((line.step, line.loss?))).collect()
    }

    #[track_caller]
    pub fn plan(&self, run: &str) -> Plan {
        let text = fs::read_to_string(self.path(run).join("plan.json")).expect("a plan");
        serde_json::from_str(&text).expect("a plan")
    }
}

#[track_caller]
pub fn alike(what: &str, one: &[(usize, f64)], other: &[(usize, f64)]) {
    assert_eq!(one.len(), other.len(), "{what}");
    for ((step, one), (other_step, other)) in one.iter().zip(other) {
        assert_eq!(step, other_step, "{what}");
        assert!((one / other - 1.0).abs() < 2e-5, "{what}, step {step}: {one} and {other}");
    }
}
