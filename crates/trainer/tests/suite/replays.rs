//! A step that is not finite leaves the state before it, and can be replayed.

use std::path::{Path, PathBuf};

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Error, Outcome, Replayed, Run, Start, failed_dir, replay, run};

use crate::plans::{plan, source};

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("lockstep-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// All files below a folder, with their bytes.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => found.push((path.clone(), std::fs::read(&path).unwrap())),
        }
    }
    found.sort();
    found
}

fn train(plan: &Plan, folder: &Path) -> Vec<Option<Error>> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let inputs = Run {
            plan,
            device: Device::from_env(plan.train.threads),
            group: &world,
            source: &source,
            folder,
            start: None,
            generation: None,
            stop: &|| false,
        };
        run(&inputs, &mut |_| {}).err()
    })
}

fn replayed(plan: &Plan, folder: &Path, start: Option<PathBuf>, step: u64) -> Vec<Replayed> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = start.clone().map(|checkpoint| Start { checkpoint, resume: true });
        let inputs = Run {
            plan,
            device: Device::from_env(plan.train.threads),
            group: &world,
            source: &source,
            folder,
            start,
            generation: None,
            stop: &|| false,
        };
        replay(&inputs, step, |_| {}).unwrap()
    })
}

/// Settings with which the second or third step is not finite.
const DIVERGING: [&str; 5] =
    ["train.lr=1e30", "train.min_lr=0", "train.warmup=0", "train.clip=0", "train.weight_decay=0"];

#[test]
fn a_step_that_is_not_finite_is_replayed_the_same() {
    for (ranks, layout) in [
        (1, vec![]),
        (2, vec!["layout.zero=3"]),
        (2, vec!["layout.tensor=2"]),
        (2, vec!["layout.pipe=2"]),
        (2, vec!["layout.context=2"]),
    ] {
        let plan = plan(ranks, &[&DIVERGING[..], &layout].concat());
        let folder = folder(&format!("diverged-{ranks}-{}", layout.concat()));
        let errors = train(&plan, &folder);
        let steps: Vec<u64> = errors
            .iter()
            .map(|error| match error {
                Some(Error::NotFinite { step, .. }) => *step,
                other => panic!("{layout:?}: {other:?}"),
            })
            .collect();
        let step = steps[0];
        assert!(step > 1 && steps.iter().all(|other| *other == step), "{layout:?}: {steps:?}");

        let (done, state) = lockstep_ckpt::before(&failed_dir(&folder), step).unwrap().unwrap();
        assert_eq!(done, step - 1, "the state before the step is saved");
        assert!(
            lockstep_ckpt::latest(&folder).unwrap().is_none(),
            "but not as a checkpoint to resume from"
        );
        let before = files(&folder);
        for start in [Some(state), None] {
            for replayed in replayed(&plan, &folder, start, step) {
                assert_eq!(replayed.divergence, None, "{layout:?}");
                assert!(matches!(replayed.outcome, Outcome::NotFinite { .. }), "{layout:?}");
                assert!(!replayed.samples.is_empty(), "{layout:?}");
            }
        }
        assert!(files(&folder) == before, "nothing was written");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn a_finite_step_is_replayed_with_the_same_loss() {
    let plan =
        plan(2, &["train.steps=5", "train.log_every=1", "checkpoint.every=2", "checkpoint.keep=0"]);
    let folder = folder("finite");
    assert!(train(&plan, &folder).iter().all(Option::is_none));
    let reports = lockstep_events::read(&folder.join("metrics.jsonl")).unwrap();
    for step in 1..=5u64 {
        let start = lockstep_ckpt::before(&folder, step).unwrap();
        assert_eq!(
            start.as_ref().map(|(done, _)| *done),
            [None, None, Some(2), Some(2), Some(4)][step as usize - 1]
        );
        for replayed in replayed(&plan, &folder, start.map(|(_, path)| path), step) {
            let Outcome::Finite(stepped) = replayed.outcome else { panic!("step {step}") };
            let loss = reports.iter().find(|line| line.step as u64 == step).unwrap().loss;
            assert_eq!((replayed.divergence, Some(stepped.loss)), (None, loss), "step {step}");
            assert!(replayed.samples.is_empty());
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
