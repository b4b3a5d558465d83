//! A run that goes on from a checkpoint is the run that was not interrupted.

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

/// The parameters, and after which step it stopped, where `stop` is asked with the rank.
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
        let device = Device::cpu(plan.train.threads);
        let run_of =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let finished = run(&run_of, &mut |_| {}).unwrap();
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

#[test]
fn a_run_that_is_asked_to_stop_saves_and_goes_on_later() {
    let temporary = std::env::temp_dir().join(format!("lockstep-stop-{}", std::process::id()));
    let (whole, stopped) = (temporary.join("whole"), temporary.join("stopped"));
    std::fs::create_dir_all(&whole).unwrap();
    std::fs::create_dir_all(&stopped).unwrap();
    let sets = ["train.steps=7", "train.log_every=1", "checkpoint.every=0"];
    let uninterrupted = train(&whole, &sets, false);
    // Only one rank is asked, and all stop after the same step, which differs from one try to the next: once before
    // the first step, and then after some.
    for (resume, calls, after) in [(false, 0, 0), (false, 3, 3), (true, 2, 5)] {
        let asked = AtomicUsize::new(0);
        let stop = |rank: usize| rank == 1 && asked.fetch_add(1, Ordering::Relaxed) >= calls;
        let (_, step) = train_until(&stopped, &sets, resume, stop);
        assert_eq!(step, Some(after));
    }
    let (resumed, step) = train_until(&stopped, &sets, true, |_| false);
    assert_eq!(step, None);
    assert!(uninterrupted == resumed, "the same parameters to the bit");
    let reports = read(&stopped.join("metrics.jsonl")).unwrap();
    let steps: Vec<usize> =
        reports.iter().filter(|line| line.loss.is_some()).map(|line| line.step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7], "every step was reported once");
    std::fs::remove_dir_all(&temporary).unwrap();
}
