//! `lockstep trees` through the binary: ranks and engines, files, errors, kills and resumed runs.

mod program;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

/// A folder with small data files. Removed at the end.
struct Workspace {
    folder: PathBuf,
}

impl Workspace {
    fn new(name: &str) -> Workspace {
        let folder =
            std::env::temp_dir().join(format!("lockstep-trees-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let workspace = Workspace { folder };
        workspace.write("train.csv", &csv(1500, 0));
        workspace.write("valid.csv", &csv(400, 5000));
        workspace.write(
            "trees.toml",
            "[data]\ntrain = \"train.csv\"\neval = { valid = \"valid.csv\" }\ncategorical = [\"city\"]\n\
             [trees]\nobjective = \"logistic\"\nrounds = 8\nmax_depth = 4\nmetrics = [\"logloss\", \"auc\"]\n\
             [run]\ncheckpoint_every = 2\nreport_every = 4\nthreads = 1\n",
        );
        workspace
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.join(name), text).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn run(&self, args: &str) -> Output {
        let mut command = program::lockstep();
        command.args(args.split_whitespace()).current_dir(&self.folder);
        command.output().unwrap()
    }

    fn ok(&self, args: &str) -> String {
        let output = self.run(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn error(&self, args: &str) -> String {
        let output = self.run(args);
        assert!(!output.status.success(), "{args}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn model(&self, run: &str) -> Vec<u8> {
        std::fs::read(self.path(&format!("runs/{run}/model.json"))).unwrap()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn csv(rows: usize, first: usize) -> String {
    let mut text = String::from("id,label,a,b,city\n");
    for row in first..first + rows {
        let (a, b) = (row * 7919 % 1000, row * 104_729 % 777);
        let city = ["Bern", "Oslo", "\"New York, NY\""][row * 31 % 3];
        let label = usize::from(a > 600) ^ usize::from(row % 3 == 1 && b > 300);
        let b = if row % 5 == 0 { String::new() } else { b.to_string() };
        writeln!(text, "{row},{label},{a},{b},{city}").unwrap();
    }
    text
}

#[test]
fn ranks_and_engines_give_the_same_model() {
    let workspace = Workspace::new("engines");
    let out = workspace.ok("trees train trees.toml --set name=one");
    for part in [
        "1,500 rows × 4 features",
        "round 8/8 | valid-logloss",
        "valid-auc 0.9",
        "run folder: runs/one",
    ] {
        assert!(out.contains(part), "no {part:?} in:\n{out}");
    }
    let model = workspace.model("one");
    for (name, args) in [
        ("shm", "--ranks 2"),
        ("tcp", "--ranks 3 --engine tcp"),
        ("threads", "--ranks 4 --engine threads --set run.threads=2"),
    ] {
        workspace.ok(&format!("trees train trees.toml --set name={name} {args}"));
        assert!(workspace.model(name) == model, "{name}");
        let run = workspace.path(&format!("runs/{name}"));
        let metrics = lockstep_events::read(&run.join("metrics.jsonl")).unwrap();
        assert_eq!(metrics.len(), 8);
        assert!(metrics[7].more["valid-auc"].as_f64().unwrap() > 0.9);
        assert!(run.join("tensorboard").read_dir().unwrap().count() == 1);
        let mut names: Vec<String> = std::fs::read_dir(run.join("checkpoints"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["round-00000006.json", "round-00000008.json"]);
    }
    assert!(workspace.path("runs/tcp/logs/rank-2.log").exists());
    // The bins of the first run are used again.
    let out = workspace.ok("trees train trees.toml --set name=one");
    assert!(out.contains("mapped the bins of an earlier start"), "{out}");
    assert!(workspace.path("runs/one.1/model.json").exists());
    assert!(workspace.model("one") == model);
}

#[test]
fn models_predict_and_convert() {
    let workspace = Workspace::new("models");
    workspace.ok("trees train trees.toml");
    let predictions = workspace.ok("trees predict runs/trees valid.csv");
    assert_eq!(predictions.lines().count(), 400);
    assert!(predictions.lines().all(|p| (0.0..=1.0).contains(&p.parse::<f32>().unwrap())));
    let metrics = workspace.ok("trees eval runs/trees valid.csv --metrics logloss,error,auc");
    let values: Vec<(&str, f64)> = metrics
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect();
    assert_eq!(values[0].0, "logloss");
    let lines = lockstep_events::read(&workspace.path("runs/trees/metrics.jsonl")).unwrap();
    let trained = lines[7].more["valid-logloss"].as_f64().unwrap();
    assert!((values[0].1 - trained).abs() < 1e-5, "{values:?} {trained}");
    let out = workspace.ok("trees inspect runs/trees --tree 0");
    for part in ["objective binary:logistic", "mean gain", "tree 0 (output 0):", "missing"] {
        assert!(out.contains(part), "no {part:?} in:\n{out}");
    }
    workspace.ok("trees export runs/trees out.ubj");
    workspace.ok("trees import out.ubj copy");
    assert!(workspace.model("copy") == workspace.model("trees"));
    assert_eq!(workspace.ok("trees predict out.ubj valid.csv"), predictions);
    let contributions = workspace.ok("trees predict runs/trees valid.csv --contributions");
    let margins = workspace.ok("trees predict runs/trees valid.csv --margins");
    for (row, margin) in contributions.lines().zip(margins.lines()) {
        let sum: f32 = row.split(',').map(|value| value.parse::<f32>().unwrap()).sum();
        assert!((sum - margin.parse::<f32>().unwrap()).abs() < 1e-3);
    }
    workspace.ok("trees predict runs/trees valid.csv -o p.npy");
    assert!(std::fs::metadata(workspace.path("p.npy")).unwrap().len() == 128 + 1600);
    assert!(workspace.error("trees inspect runs/trees --tree 99").contains("out of range"));
    assert!(workspace.error("trees import out.ubj copy").contains("already exists"));
}

#[test]
fn errors_suggest_a_fix() {
    let workspace = Workspace::new("errors");
    let error = |args: &str| workspace.error(&format!("trees train trees.toml {args}"));
    assert!(error("--set trees.eta=0").contains("trees.eta must be positive (got 0)"));
    assert!(error("--set trees.stepz=1").contains("unknown field `stepz`"));
    assert!(error("--set data.train=missing.csv").contains("missing.csv"));
    assert!(error("--resume").contains("no checkpoint to resume from"));
    assert!(error("--set data.label=nope").contains("there is no column \"nope\" (data.label)"));
    let mut bad = csv(100, 0);
    bad.push_str("1,0,5\n");
    workspace.write("bad.csv", &bad);
    for ranks in ["--ranks 1", "--ranks 2", "--ranks 2 --engine threads"] {
        let error = error(&format!("--set data.train=bad.csv {ranks}"));
        let expected = "bad.csv: line 102, column 4: the line has 3 fields, expected 5";
        assert!(error.contains(expected), "{error}");
    }
}

/// Keys of runs that last long enough to be killed.
const LONG: &str = "--set trees.rounds=400 --set trees.max_depth=3 --set data.eval={}";

/// A busy machine may not run this test again before a training has ended.
const ATTEMPTS: usize = 5;

/// A rank is killed between checkpoints: the others restart it, and the model has the same bytes.
#[test]
fn a_killed_rank_does_not_change_the_model() {
    let workspace = Workspace::new("killed");
    workspace
        .ok(&format!("trees train trees.toml {LONG} --set name=whole --ranks 2 --engine threads"));
    let killed = (0..ATTEMPTS).any(|_| {
        let mut launcher = start_until_checkpoint(&workspace);
        if let Some(rank) = child_of(launcher.id()) {
            // SAFETY: a plain system call. A rank that has ended stays a process until its launcher has waited for it.
            unsafe { libc::kill(rank as i32, libc::SIGKILL) };
        }
        assert!(launcher.wait().unwrap().success());
        assert!(workspace.model("killed") == workspace.model("whole"));
        let generation = std::fs::read_to_string(workspace.path("runs/killed/generation")).unwrap();
        generation.trim().parse::<u64>().unwrap() > 1
    });
    assert!(killed, "every run ended before a rank could be killed");
}

/// The launcher is killed; the same command with --resume finishes on another number of ranks.
#[test]
fn a_killed_launcher_is_resumed_on_other_ranks() {
    let workspace = Workspace::new("launcher");
    workspace.ok(&format!("trees train trees.toml {LONG} --set name=whole"));
    let killed = (0..ATTEMPTS).any(|_| {
        let mut launcher = start_until_checkpoint(&workspace);
        launcher.kill().unwrap();
        !launcher.wait().unwrap().success()
    });
    assert!(killed, "every run ended before its launcher could be killed");
    workspace
        .ok(&format!("trees train trees.toml {LONG} --set name=killed --ranks 3 --resume=if-any"));
    assert!(workspace.model("killed") == workspace.model("whole"));
}

/// SIGTERM saves the rounds so far and exits with code 75; the run then ends with the bytes of an undisturbed one.
#[test]
fn a_stopped_run_exits_with_75_and_is_resumed() {
    let workspace = Workspace::new("stopped");
    workspace.ok(&format!("trees train trees.toml {LONG} --set name=whole"));
    let stopped = (0..ATTEMPTS).any(|_| {
        let mut launcher = start_until_checkpoint(&workspace);
        // SAFETY: a plain system call. The launcher stays a process until it has been waited for.
        unsafe { libc::kill(launcher.id() as i32, libc::SIGTERM) };
        match launcher.wait().unwrap().code() {
            Some(0) => false,
            code => {
                assert_eq!(code, Some(75));
                true
            }
        }
    });
    assert!(stopped, "every run ended before it could be stopped");
    let run = workspace.path("runs/killed");
    assert!(!run.join("model.json").exists());
    workspace.ok(&format!("trees train trees.toml {LONG} --set name=killed --ranks 3 --resume"));
    assert!(workspace.model("killed") == workspace.model("whole"));
}

/// Starts a run `killed` on two ranks, and waits until it has a checkpoint or has ended.
fn start_until_checkpoint(workspace: &Workspace) -> Child {
    let checkpoints = workspace.path("runs/killed/checkpoints");
    // An earlier run is renamed only when the new one starts.
    let _ = std::fs::remove_dir_all(workspace.path("runs/killed"));
    let args = format!("trees train trees.toml {LONG} --set name=killed --ranks 2");
    let mut launcher = program::lockstep()
        .args(args.split_whitespace())
        .current_dir(&workspace.folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let has_checkpoint =
        || std::fs::read_dir(&checkpoints).is_ok_and(|entries| entries.count() > 0);
    while !has_checkpoint() && launcher.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    launcher
}

/// A child process, if there is one.
fn child_of(parent: u32) -> Option<u32> {
    let children =
        std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

#[test]
fn the_example_runs() {
    let workspace = Workspace::new("example");
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/trees.toml");
    let small =
        "--set data.generate.rows=5000 --set data.generate.eval_rows=1000 --set trees.rounds=10";
    let out = workspace.ok(&format!("trees train {} {small}", example.display()));
    assert!(
        out.contains("the true probabilities have a logloss of") && out.contains("best round"),
        "{out}"
    );
}
