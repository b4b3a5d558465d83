//! Checkpoints that are whole, and those that are not.

use crate::support::{FIXTURES, fixture, fresh, same};
use lockstep_ckpt::hf::Source;
use lockstep_ckpt::{
    Carried, Head, Moments, Slices, Tensors, find, latest, load, prune, save, sweep,
};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};

/// A run with one checkpoint for each step, of the fixture `llama`.
fn run(name: &str, steps: &[u64]) -> PathBuf {
    let run = fresh(name);
    for step in steps {
        write(&run, *step, None);
    }
    run
}

fn write(run: &Path, step: u64, moments: Option<Moments>) -> PathBuf {
    let source = Source::open(&fixture("llama")).unwrap();
    let (shape, plan) = (source.shape().clone(), json!({"name": "test"}));
    let head = Head { step, shape, plan, carried: Carried::default() };
    save(run, &head, &source, moments).unwrap()
}

#[test]
fn what_is_saved_is_loaded() {
    for name in FIXTURES {
        let source = Source::open(&fixture(name)).unwrap();
        let run = fresh(&format!("saved-{name}"));
        let head = Head {
            step: 100,
            shape: source.shape().clone(),
            plan: json!({"lr": 3e-4, "steps": [1, 2]}),
            carried: Carried { left_out: 3, learner: json!({"policy_version": 7}) },
        };
        let dir = save(&run, &head, &source, None).unwrap();
        assert_eq!(dir, run.join("checkpoints/step-00000100"));
        let checkpoint = load(&dir).unwrap();
        assert_eq!(checkpoint.head(), &head);
        same(checkpoint.params(), &source);
        assert!(checkpoint.moments().is_none());
    }
}

#[test]
fn moments_come_back_from_memory() {
    let source = Source::open(&fixture("llama")).unwrap();
    // Two sets of values that differ from the weights and from each other.
    let values = |scale: f32| -> Vec<Vec<f32>> {
        source.list().iter().map(|n| (0..n.len()).map(|i| i as f32 * scale).collect()).collect()
    };
    let slices = |values: &'static [Vec<f32>]| {
        let tensors = source.list().iter().zip(values);
        Slices::new(tensors.map(|(n, v)| (n.name.clone(), n.dims.clone(), v.as_slice())))
    };
    let (first, second) = (slices(values(0.5).leak()), slices(values(-2.0).leak()));
    let run = fresh("moments");
    let dir = write(&run, 7, Some(Moments { first: &first, second: &second }));
    let checkpoint = load(&dir).unwrap();
    let moments = checkpoint.moments().unwrap();
    same(moments.first, &first);
    same(moments.second, &second);
    same(checkpoint.params(), &source);
}

#[test]
fn the_newest_whole_checkpoint_is_found() {
    let run = run("newest", &[5, 100, 20]);
    let checkpoints = run.join("checkpoints");
    let newest = checkpoints.join("step-00000100");
    assert_eq!(latest(&run).unwrap(), Some(newest.clone()));
    assert_eq!(find(&run).unwrap(), newest);
    assert_eq!(
        find(&checkpoints.join("step-00000005")).unwrap(),
        checkpoints.join("step-00000005")
    );

    // What a killed save leaves, and what else may lie there.
    fs::create_dir(checkpoints.join(".step-00000200.partial")).unwrap();
    fs::copy(
        newest.join("checkpoint.json"),
        checkpoints.join(".step-00000200.partial/checkpoint.json"),
    )
    .unwrap();
    fs::create_dir(checkpoints.join("step-notes")).unwrap();
    assert_eq!(latest(&run).unwrap(), Some(newest.clone()));

    // A copy that was broken off.
    fs::remove_file(newest.join("model.safetensors")).unwrap();
    assert_eq!(latest(&run).unwrap(), Some(checkpoints.join("step-00000020")));
}

#[test]
fn sweeping_removes_what_was_left_and_nothing_else() {
    let run = run("swept", &[5, 100]);
    let checkpoints = run.join("checkpoints");
    // A save that was killed, a prune that was killed, and what a user may have put there.
    for name in [".step-00000200.partial", "step-00000003.removed", "step-notes", "old.removed"] {
        fs::create_dir(checkpoints.join(name)).unwrap();
        fs::write(checkpoints.join(name).join("checkpoint.json"), "{}").unwrap();
    }
    sweep(&run).unwrap();
    assert_eq!(
        names(&checkpoints),
        ["old.removed", "step-00000005", "step-00000100", "step-notes"]
    );
    sweep(&fresh("never-swept")).unwrap();
}

#[test]
fn pruning_keeps_the_newest_and_leaves_nothing() {
    let run = run("pruned", &[5, 100, 20, 7]);
    prune(&run, 0).unwrap();
    assert_eq!(names(&run.join("checkpoints")).len(), 4, "0 keeps all");
    prune(&run, 2).unwrap();
    assert_eq!(names(&run.join("checkpoints")), ["step-00000020", "step-00000100"]);
}

/// What lies in a folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn no_checkpoint_is_told_apart_from_broken_ones() {
    let run = run("broken", &[1, 2]);
    assert_eq!(latest(&fresh("never")).unwrap(), None);
    let error = find(&fresh("never")).unwrap_err().to_string();
    assert!(error.contains("name a run folder or one of its checkpoints"), "{error}");
    for step in 1..=2 {
        fs::remove_file(run.join(format!("checkpoints/step-0000000{step}/checkpoint.json")))
            .unwrap();
    }
    let error = latest(&run).unwrap_err().to_string();
    assert!(error.contains("step-00000002"), "{error}");
}

#[test]
fn every_part_that_is_damaged_is_noticed() {
    let source = Source::open(&fixture("llama")).unwrap();
    for file in ["model.safetensors", "optimizer.safetensors", "checkpoint.json"] {
        let run = fresh("damaged");
        let dir = write(&run, 1, Some(Moments { first: &source, second: &source }));
        let path = dir.join(file);
        let whole = fs::read(&path).unwrap();
        for length in [0, 1, 9, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            let error =
                load(&dir).err().unwrap_or_else(|| panic!("{file} of {length} bytes was taken"));
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
        fs::write(&path, &whole).unwrap();
        assert!(load(&dir).is_ok());
        fs::remove_file(&path).unwrap();
        assert!(load(&dir).is_err());
    }
}

#[test]
fn other_versions_and_other_models_are_refused() {
    let run = run("versions", &[1]);
    let path = run.join("checkpoints/step-00000001/checkpoint.json");
    let text = fs::read_to_string(&path).unwrap();
    for (from, to, says) in [
        ("\"version\": 1", "\"version\": 2", "version 2, this program reads version 1"),
        ("lockstep-checkpoint", "other", "does not say that it is a lockstep-checkpoint"),
        ("\"layers\": 2", "\"layers\": 3", "layers.2.norm1.gain [32] is missing"),
    ] {
        assert!(text.contains(from), "{text}");
        fs::write(&path, text.replace(from, to)).unwrap();
        let error = load(path.parent().unwrap()).err().expect("refused").to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_step_is_not_saved_twice_and_a_failed_save_leaves_nothing() {
    let run = run("twice", &[1]);
    let source = Source::open(&fixture("llama")).unwrap();
    let (shape, plan) = (source.shape().clone(), json!(null));
    let head = Head { step: 1, shape, plan, carried: Carried::default() };
    let error = save(&run, &head, &source, None).unwrap_err().to_string();
    assert!(error.contains("is there already"), "{error}");

    // The reader of one tensor fails in the middle.
    struct Failing<'a>(&'a Source);
    impl Tensors for Failing<'_> {
        fn list(&self) -> &[lockstep_ckpt::Named] {
            self.0.list()
        }
        fn read(&self, name: &str, out: &mut [f32]) {
            assert!(name != "layers.1.norm1.gain", "struck down");
            self.0.read(name, out)
        }
    }
    let head = Head { step: 2, ..head };
    let save = || save(&run, &head, &Failing(&source), None);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(save)).is_err());
    assert_eq!(names(&run.join("checkpoints")), ["step-00000001"]);
}
