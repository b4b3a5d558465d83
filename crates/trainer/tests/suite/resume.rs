//! A resumed run equals an uninterrupted one.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_comm::on_threads;
use lockstep_events::read;
use lockstep_kernels::Device;
use lockstep_trainer::{Run, Start, run};

use crate::plans::{masters, plan, source};

fn train(folder: &Path, sets: &[&str], resume: bool) -> Vec<f32> {
    train_until(folder, sets, resume, |_| false).0
}

/// Rank 0's parameters and the step after which the run stopped. `stop` is called with the rank.
fn train_until(
    folder: &Path,
    sets: &[&str],
    resume: bool,
    stop: impl Fn(usize) -> bool + Sync,
) -> (Vec<f32>, Option<u64>) {
    let (plan, source) = (plan(2, sets), source());
    on_threads(2, |world| {
        let start = resume
            .then(|| Start { checkpoint: lockstep_ckpt::find(folder).unwrap(), resume: true });
        world.barrier().unwrap();
        let stop = &|| stop(world.rank());
        let (plan, source) = (&plan, &source);
        let device = Device::from_env(plan.train.threads);
        let inputs =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let finished = run(&inputs, &mut |_| {}).unwrap();
        (masters(&finished.rank), finished.stopped)
    })
    .remove(0)
}

#[test]
fn resumed_equals_uninterrupted() {
    let temporary = std::env::temp_dir().join(format!("lockstep-resume-{}", std::process::id()));
    let (whole, halves) = (temporary.join("whole"), temporary.join("halves"));
    std::fs::create_dir_all(&whole).unwrap();
    std::fs::create_dir_all(&halves).unwrap();
    // The learning rate must not depend on the number of steps.
    let schedule = ["train.schedule=constant", "train.warmup=4", "train.log_every=1"];
    let uninterrupted = train(&whole, &[&schedule[..], &["train.steps=8"]].concat(), false);
    train(&halves, &[&schedule[..], &["train.steps=5"]].concat(), false);
    // Leftovers of a run that was killed while saving and pruning.
    let checkpoints = halves.join("checkpoints");
    let leftovers =
        [".step-00000006.partial", "step-00000004.removed"].map(|name| checkpoints.join(name));
    leftovers.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    let resumed = train(&halves, &[&schedule[..], &["train.steps=8"]].concat(), true);
    assert!(uninterrupted == resumed, "parameters differ");
    assert!(leftovers.iter().all(|path| !path.exists()), "leftovers were not removed");

    let steps: Vec<usize> = read(&halves.join("metrics.jsonl"))
        .unwrap()
        .iter()
        .filter(|line| line.loss.is_some())
        .map(|line| line.step)
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7, 8], "every step is reported once");
    std::fs::remove_dir_all(&temporary).unwrap();
}

#[test]
fn a_run_that_is_asked_to_stop_saves_and_can_be_resumed() {
    let temporary = std::env::temp_dir().join(format!("lockstep-stop-{}", std::process::id()));
    let (whole, stopped) = (temporary.join("whole"), temporary.join("stopped"));
    std::fs::create_dir_all(&whole).unwrap();
    std::fs::create_dir_all(&stopped).unwrap();
    let sets = ["train.steps=7", "train.log_every=1", "checkpoint.every=0"];
    let uninterrupted = train(&whole, &sets, false);
    // Only rank 1 is asked to stop, but all ranks stop after the same step: before the first one, after 3 and after 5.
    for (resume, calls, after) in [(false, 0, 0), (false, 3, 3), (true, 2, 5)] {
        let asked = AtomicUsize::new(0);
        let stop = |rank: usize| rank == 1 && asked.fetch_add(1, Ordering::Relaxed) >= calls;
        let (_, step) = train_until(&stopped, &sets, resume, stop);
        assert_eq!(step, Some(after));
    }
    let (resumed, step) = train_until(&stopped, &sets, true, |_| false);
    assert_eq!(step, None);
    assert!(uninterrupted == resumed, "parameters differ");
    let reports = read(&stopped.join("metrics.jsonl")).unwrap();
    let steps: Vec<usize> =
        reports.iter().filter(|line| line.loss.is_some()).map(|line| line.step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7], "every step is reported once");
    std::fs::remove_dir_all(&temporary).unwrap();
}
