//! A run that goes on from a checkpoint is the run that was not interrupted.

use std::path::Path;

use lockstep_comm::on_threads;
use lockstep_events::read;
use lockstep_trainer::{Run, Start, run};

use crate::plans::{masters, plan, source};

fn train(folder: &Path, sets: &[&str], resume: bool) -> Vec<f32> {
    let (plan, source) = (plan(2, sets), source());
    on_threads(2, |world| {
        let start = resume
            .then(|| Start { checkpoint: lockstep_ckpt::find(folder).unwrap(), resume: true });
        world.barrier().unwrap();
        let run_of = Run { plan: &plan, group: &world, source: &source, folder, start };
        masters(&run(&run_of, &mut |_| {}).unwrap())
    })
    .remove(0)
}

#[test]
fn resumed_equals_uninterrupted() {
    let temporary = std::env::temp_dir().join(format!("lockstep-resume-{}", std::process::id()));
    let (whole, halves) = (temporary.join("whole"), temporary.join("halves"));
    std::fs::create_dir_all(&whole).unwrap();
    std::fs::create_dir_all(&halves).unwrap();
    // One schedule for both: only where the run stops differs.
    let schedule = ["train.schedule=constant", "train.warmup=4", "train.log_every=1"];
    let uninterrupted = train(&whole, &[&schedule[..], &["train.steps=8"]].concat(), false);
    train(&halves, &[&schedule[..], &["train.steps=5"]].concat(), false);
    // What a run that was killed while it saved and pruned leaves behind.
    let checkpoints = halves.join("checkpoints");
    let left =
        [".step-00000006.partial", "step-00000004.removed"].map(|name| checkpoints.join(name));
    left.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    let resumed = train(&halves, &[&schedule[..], &["train.steps=8"]].concat(), true);
    assert!(uninterrupted == resumed, "the same parameters to the bit");
    assert!(left.iter().all(|path| !path.exists()), "the next run has swept");

    let steps: Vec<usize> = read(&halves.join("metrics.jsonl"))
        .unwrap()
        .iter()
        .filter(|line| line.loss.is_some())
        .map(|line| line.step)
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7, 8], "every step was reported once");
    std::fs::remove_dir_all(&temporary).unwrap();
}
