//! A step that came out as no number leaves its state, and can be done again.

use std::path::{Path, PathBuf};

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Error, Outcome, Replayed, Run, Start, failed, replay, run};

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
        let run_of = Run {
            plan,
            device: Device::cpu(plan.train.threads),
            group: &world,
            source: &source,
            folder,
            start: None,
            generation: None,
            stop: &|| false,
        };
        run(&run_of, &mut |_| {}).err()
    })
}

fn replayed(plan: &Plan, folder: &Path, start: Option<PathBuf>, step: u64) -> Vec<Replayed> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = start.clone().map(|checkpoint| Start { checkpoint, resume: true });
        let run_of = Run {
            plan,
            device: Device::cpu(plan.train.threads),
            group: &world,
            source: &source,
            folder,
            start,
            generation: None,
            stop: &|| false,
        };
        replay(&run_of, step, |_| {}).unwrap()
    })
}

/// A learning rate under which the second or third step is not finite.
const WILD: [&str; 5] =
    ["train.lr=1e30", "train.min_lr=0", "train.warmup=0", "train.clip=0", "train.weight_decay=0"];

#[test]
fn a_step_that_diverged_does_so_again() {
    for (ranks, layout) in [
        (1, vec![]),
        (2, vec!["layout.zero=3"]),
        (2, vec!["layout.tensor=2"]),
        (2, vec!["layout.pipe=2"]),
        (2, vec!["layout.context=2"]),
    ] {
        let plan = plan(ranks, &[&WILD[..], &layout].concat());
        let folder = folder(&format!("diverged-{ranks}-{}", layout.concat()));
        let ended = train(&plan, &folder);
        let steps: Vec<u64> = ended
            .iter()
            .map(|error| match error {
                Some(Error::NotFinite { step, .. }) => *step,
                other => panic!("{layout:?}: {other:?}"),
            })
            .collect();
        let step = steps[0];
        assert!(step > 1 && steps.iter().all(|other| *other == step), "{layout:?}: {steps:?}");

        let (done, state) = lockstep_ckpt::before(&failed(&folder), step).unwrap().unwrap();
        assert_eq!(done, step - 1, "the state before the step is kept");
        assert!(lockstep_ckpt::latest(&folder).unwrap().is_none(), "but not to go on from");
        let before = files(&folder);
        for start in [Some(state), None] {
            for again in replayed(&plan, &folder, start, step) {
                assert_eq!(again.parting, None, "{layout:?}");
                assert!(matches!(again.outcome, Outcome::NotFinite { .. }), "{layout:?}");
                assert!(!again.samples.is_empty(), "{layout:?}");
            }
        }
        assert!(files(&folder) == before, "nothing was written");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn a_good_step_is_told_as_it_was() {
    let plan =
        plan(2, &["train.steps=5", "train.log_every=1", "checkpoint.every=2", "checkpoint.keep=0"]);
    let folder = folder("good");
    assert!(train(&plan, &folder).iter().all(Option::is_none));
    let reports = lockstep_events::read(&folder.join("metrics.jsonl")).unwrap();
    for step in 1..=5u64 {
        let start = lockstep_ckpt::before(&folder, step).unwrap();
        assert_eq!(
            start.as_ref().map(|(done, _)| *done),
            [None, None, Some(2), Some(2), Some(4)][step as usize - 1]
        );
        for again in replayed(&plan, &folder, start.map(|(_, path)| path), step) {
            let Outcome::Finite(stepped) = again.outcome else { panic!("step {step}") };
            let loss = reports.iter().find(|line| line.step as u64 == step).unwrap().loss;
            assert_eq!((again.parting, Some(stepped.loss)), (None, loss), "step {step}");
            assert!(again.samples.is_empty());
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
