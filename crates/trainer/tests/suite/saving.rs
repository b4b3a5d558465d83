//! Asynchronous checkpoints: a failure affects only the checkpoint being saved.

use std::io::{Error as IoError, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_ckpt::{Disk, DiskOp, Position, claim, steps};
use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{
    Event, FailedSave, Rank, Run, SaveOutcome, Saver, Start, agree, build, run,
};

use crate::plans::{masters, plan, source};
use crate::reshard::folder;

/// A plan with a constant learning rate, independent of the number of steps.
fn small(steps: &str) -> Plan {
    plan(2, &["train.schedule=constant", "train.warmup=2", "checkpoint.every=2", steps])
}

/// Runs to the last step of the plan. Returns rank 0's parameters and events.
fn train(plan: &Plan, folder: &Path, resume: bool) -> (Vec<f32>, Vec<String>) {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = resume.then(|| Start { checkpoint: folder.to_path_buf(), resume: true });
        let mut events = Vec::new();
        let on_event = &mut |event: Event<'_>| match event {
            Event::Saved(saved) => events.push(format!("saved {}", saved.step)),
            Event::SaveFailed(FailedSave { step, rank, what, .. }) => {
                events.push(format!("failed {step}, rank {rank}: {what}"))
            }
            Event::SkippedCheckpoint { path, rank, what } => {
                events.push(format!("skipped {}, rank {rank}: {what}", path.display()))
            }
            _ => {}
        };
        let (source, stop) = (&source, &|| false);
        let device = Device::from_env(plan.train.threads);
        let inputs =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let masters = masters(&run(&inputs, on_event).unwrap().rank);
        (masters, events)
    })
    .remove(0)
}

/// Resumes from the newest checkpoint, trains to step `to` and saves to `disk` while taking one more step. Returns
/// rank 0's parameters and the outcome of the save.
fn save_on(disk: &Disk, plan: &Plan, folder: &Path, to: u64) -> (Vec<f32>, Option<SaveOutcome>) {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = Some(Start { checkpoint: folder.to_path_buf(), resume: true });
        let (source, stop) = (&source, &|| false);
        let device = Device::from_env(plan.train.threads);
        let run =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let (mut rank, done) = build(&run, &mut |_| {}).unwrap();
        let generation = lockstep_ckpt::newest(folder).unwrap();
        let mut saver = Saver::new(plan, &world, folder, generation, disk.clone());
        for step in done + 1..=to {
            rank.step(source, step).unwrap();
        }
        saver.begin(&rank, to, Position::default()).unwrap();
        rank.step(source, to + 1).unwrap();
        let flags = agree(&world, saver.flags()).unwrap();
        let outcome = match saver.advance(flags).unwrap() {
            None => saver.finish().unwrap(),
            outcome => outcome,
        };
        (masters(&rank), outcome)
    })
    .remove(0)
}

/// A disk that fails all operations after the first `after`, on all ranks, and a count of the operations.
fn failing_disk(after: usize) -> (Disk, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let operations = count.clone();
    let disk = Disk::with_hook(move |_| match operations.fetch_add(1, Ordering::SeqCst) < after {
        true => Ok(()),
        false => Err(IoError::other("the disk fails")),
    });
    (disk, count)
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn training_resumes_after_a_crash_at_any_disk_operation() {
    let (whole, base) = (folder("crash-whole"), folder("crash-base"));
    let (uninterrupted, events) = train(&small("train.steps=6"), &whole, false);
    assert_eq!(events, ["saved 2", "saved 4", "saved 6"]);
    train(&small("train.steps=2"), &base, false);

    let plan = small("train.steps=6");
    let (disk, count) = failing_disk(usize::MAX);
    let place = folder("crash-all");
    copy_folder(&base, &place);
    let (_, outcome) = save_on(&disk, &plan, &place, 4);
    assert!(matches!(outcome, Some(SaveOutcome::Saved(_))), "{outcome:?}");
    let operations = count.load(Ordering::SeqCst);
    assert!(operations > 20, "{operations}");

    // Some of the many writes, and all of the last operations.
    let first = (0..operations - 8).step_by(operations / 12);
    let points: Vec<usize> = first.chain(operations - 8..=operations).collect();
    let mut resumed_from = [0, 0];
    for after in points {
        let place = folder("crash-at");
        copy_folder(&base, &place);
        let (_, outcome) = save_on(&failing_disk(after).0, &plan, &place, 4);
        let case = format!("crash after {after} of {operations} operations");
        if after < operations - 1 {
            assert!(matches!(outcome, Some(SaveOutcome::Failed(_))), "{case}: {outcome:?}");
        }
        let newest = steps(&place)[0];
        resumed_from[usize::from(newest == 4)] += 1;
        assert!(newest == 2 || newest == 4, "{case}: {newest}");
        let (resumed, events) = train(&plan, &place, true);
        assert!(resumed == uninterrupted, "{case}: parameters differ");
        assert!(events.iter().all(|event| event.starts_with("saved")), "{case}: {events:?}");
    }
    assert!(resumed_from.iter().all(|count| *count > 0), "{resumed_from:?}");
}

#[test]
fn a_full_disk_fails_only_the_checkpoint() {
    let (whole, place) = (folder("full-whole"), folder("full"));
    let plan = small("train.steps=5");
    let (five, _) = train(&plan, &whole, false);
    train(&small("train.steps=2"), &place, false);
    // Only the file of rank 1 does not fit.
    let disk = Disk::with_hook(|operation| match operation {
        DiskOp::Write(path, bytes)
            if path.ends_with("rank-00001.safetensors") && bytes.len() > 99 =>
        {
            Err(IoError::from(ErrorKind::StorageFull))
        }
        _ => Ok(()),
    });
    let (continued, outcome) = save_on(&disk, &plan, &place, 4);
    let Some(SaveOutcome::Failed(FailedSave { step: 4, rank: 1, what, .. })) = outcome else {
        panic!("{outcome:?}")
    };
    assert!(what.contains("rank-00001.safetensors") && what.contains("no storage space"), "{what}");
    assert!(continued == five, "the failed checkpoint changed the training");
    assert_eq!(steps(&place), [2], "the previous checkpoint is still there");
    let left = std::fs::read_dir(place.join("checkpoints")).unwrap().count();
    assert_eq!(left, 1, "the partial checkpoint is removed");
    let (resumed, _) = train(&plan, &place, true);
    assert!(resumed == five);
}

#[test]
fn a_full_disk_frees_the_checkpoint_that_the_next_one_displaces() {
    let place = folder("full-room");
    let kept = |steps| plan(2, &["checkpoint.every=2", "checkpoint.keep=2", steps]);
    train(&kept("train.steps=4"), &place, false);
    let plan = kept("train.steps=7");
    assert_eq!(steps(&place), [4, 2]);
    let full = |operation: DiskOp<'_>| match operation {
        DiskOp::Write(..) => Err(IoError::from(ErrorKind::StorageFull)),
        _ => Ok(()),
    };
    // The last one stays, however often it fails.
    for (removed, left) in [(vec![2], [4]), (vec![], [4])] {
        let (_, outcome) = save_on(&Disk::with_hook(full), &plan, &place, 6);
        let Some(SaveOutcome::Failed(failed)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((failed.removed, steps(&place)), (removed, left.to_vec()));
    }
}

/// Puts a file where a folder will be created.
fn block(path: &Path) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, "").unwrap();
}

/// The training of a run whose last checkpoint could not be saved was discarded and repeated.
#[test]
fn a_failed_final_save_is_retried_until_it_succeeds() {
    let (whole, place) = (folder("final-whole"), folder("final"));
    let plan = small("train.steps=5");
    let (five, _) = train(&plan, &whole, false);
    // Something is in the way of the last checkpoint until two attempts have failed.
    let obstacle = lockstep_ckpt::partial_folder(&place, 5, 1);
    let mut failures = 0;
    let on_event = &mut |event: Event<'_>| match event {
        Event::Step(report) if report.step == 5 => block(&obstacle),
        Event::SaveFailed(failed) => {
            assert!(failed.step == 5 && failed.retry.is_some(), "{failed:?}");
            failures += 1;
            if failures == 2 {
                std::fs::remove_file(&obstacle).unwrap();
            }
        }
        _ => {}
    };
    let on_event = std::sync::Mutex::new(on_event);
    let source = source();
    let masters = on_threads(plan.ranks, |world| {
        let (plan, source, stop) = (&plan, &source, &|| false);
        let (folder, device) = (&place, Device::from_env(1));
        let (start, generation) = (None, None);
        let inputs = Run { plan, device, group: &world, source, folder, start, generation, stop };
        let finished = run(&inputs, &mut |event| (on_event.lock().unwrap())(event)).unwrap();
        masters(&finished.rank)
    });
    assert!(masters[0] == five);
    assert_eq!(steps(&place)[0], 5);
    assert_eq!(failures, 2);
}

#[test]
fn a_stop_request_ends_the_attempts_of_a_final_save() {
    let place = folder("final-stopped");
    let plan = small("train.steps=3");
    let obstacle = lockstep_ckpt::partial_folder(&place, 3, 1);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let source = source();
    let errors = on_threads(plan.ranks, |world| {
        let (plan, source, stopped) = (&plan, &source, &|| stop.load(Ordering::SeqCst));
        let (folder, device) = (&place, Device::from_env(1));
        let (start, generation) = (None, None);
        let inputs =
            Run { plan, device, group: &world, source, folder, start, generation, stop: stopped };
        let on_event = &mut |event: Event<'_>| match event {
            Event::Step(report) if report.step == 3 => block(&obstacle),
            Event::SaveFailed(_) => stop.store(true, Ordering::SeqCst),
            _ => {}
        };
        run(&inputs, on_event).err().map(|error| error.to_string())
    });
    assert!(
        errors.iter().all(|error| error.as_ref().is_some_and(|e| e.contains("step-00000003"))),
        "{errors:?}"
    );
}

#[test]
fn a_corrupt_checkpoint_is_skipped_and_replaced() {
    let (whole, place) = (folder("corrupt-whole"), folder("corrupt"));
    let plan = small("train.steps=6");
    let (uninterrupted, _) = train(&plan, &whole, false);
    train(&small("train.steps=4"), &place, false);
    let path = lockstep_ckpt::folder(&place, 4).join("rank-00001.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&path, bytes).unwrap();

    let (resumed, events) = train(&plan, &place, true);
    let skipped = &events[0];
    assert!(skipped.starts_with("skipped") && skipped.contains("step-00000004"), "{events:?}");
    assert!(skipped.contains("rank-00001.safetensors is corrupt at byte 0"), "{events:?}");
    assert_eq!(events[1..], ["saved 4", "saved 6"], "the corrupt checkpoint is replaced");
    assert!(resumed == uninterrupted);
    for step in steps(&place) {
        let checkpoint = lockstep_ckpt::load(&lockstep_ckpt::folder(&place, step)).unwrap();
        assert!(checkpoint.check(|_| {}).is_empty(), "step {step}");
    }
}

#[test]
fn a_fenced_generation_cannot_commit() {
    let place = folder("fenced");
    let plan = small("train.steps=5");
    train(&small("train.steps=2"), &place, false);
    // A newer generation claims the run just before the commit.
    let claimed = place.clone();
    let disk = Disk::with_hook(move |operation| {
        if matches!(operation, DiskOp::Create(path) if path.ends_with("manifest.json")) {
            claim(&claimed, 99).unwrap();
        }
        Ok(())
    });
    let (_, outcome) = save_on(&disk, &plan, &place, 4);
    let Some(SaveOutcome::Failed(FailedSave { rank: 0, what, .. })) = outcome else {
        panic!("{outcome:?}")
    };
    assert!(what.contains("generation 99 trains this run now"), "{what}");
    assert_eq!(steps(&place), [2]);
}

/// A checkpoint that is due while another is pending waits for it; both are committed.
#[test]
fn checkpoints_after_every_step_are_all_committed() {
    let place = folder("every-step");
    let sets =
        ["checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3", "train.steps=7"];
    let (_, events) = train(&plan(2, &sets), &place, false);
    let all: Vec<String> = (1..=7).map(|step| format!("saved {step}")).collect();
    assert_eq!(events, all);
    assert_eq!(steps(&place), [7, 6, 3], "the last two and every third remain");

    let metrics = lockstep_events::read(&place.join("metrics.jsonl")).unwrap();
    let saved: Vec<u64> =
        metrics.iter().filter_map(|line| line.more.get("saved_step")?.as_u64()).collect();
    assert_eq!(saved, [1, 2, 3, 4, 5, 6, 7]);
    let stalls = metrics.iter().filter(|line| line.more.contains_key("save_stall_s")).count();
    assert_eq!(stalls, 7);
}

#[test]
fn one_rank_saves_and_resumes() {
    let (whole, place) = (folder("one-rank-whole"), folder("one-rank"));
    let one_rank = |steps: &str| plan(1, &["train.schedule=constant", steps]);
    let (uninterrupted, _) = train(&one_rank("train.steps=5"), &whole, false);
    train(&one_rank("train.steps=3"), &place, false);
    let (resumed, _) = train(&one_rank("train.steps=5"), &place, true);
    assert!(uninterrupted == resumed);
    let fresh = on_threads(1, |world| {
        masters(&Rank::new(&one_rank("train.steps=5"), &world, Device::from_env(1)).unwrap())
    });
    assert!(fresh[0] != resumed, "training changed the parameters");
}
