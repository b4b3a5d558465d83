//! Saving beside the training: what goes wrong with a save goes wrong with that save alone.

use std::io::{Error as IoError, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_ckpt::{Disk, DiskOp, Position, claim, steps};
use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Event, Rank, Run, SaveOutcome, Saver, Start, agree, build, run};

use crate::plans::{masters, plan, source};
use crate::reshard::folder;

/// One schedule, wherever a run stops.
fn small(steps: &str) -> Plan {
    plan(2, &["train.schedule=constant", "train.warmup=2", "checkpoint.every=2", steps])
}

/// Runs to the plan's end: the first rank's parameters, and what was told.
fn train(plan: &Plan, folder: &Path, resume: bool) -> (Vec<f32>, Vec<String>) {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = resume.then(|| Start { checkpoint: folder.to_path_buf(), resume: true });
        let mut told = Vec::new();
        let tell = &mut |event: Event<'_>| match event {
            Event::Saved(saved) => told.push(format!("saved {}", saved.step)),
            Event::SaveFailed { step, rank, what } => {
                told.push(format!("failed {step}, rank {rank}: {what}"))
            }
            Event::SkippedCheckpoint { path, rank, what } => {
                told.push(format!("passed over {}, rank {rank}: {what}", path.display()))
            }
            Event::Step(_) | Event::Evaluated(_) | Event::Slow(_) => {}
        };
        let (source, stop) = (&source, &|| false);
        let device = Device::cpu(plan.train.threads);
        let run_of =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let masters = masters(&run(&run_of, tell).unwrap().rank);
        (masters, told)
    })
    .remove(0)
}

/// Goes on from the newest checkpoint to step `to` and saves there, on a disk that is watched. What the training
/// has become, and how the save ended.
fn save_on(disk: &Disk, plan: &Plan, folder: &Path, to: u64) -> (Vec<f32>, Option<SaveOutcome>) {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = Some(Start { checkpoint: folder.to_path_buf(), resume: true });
        let (source, stop) = (&source, &|| false);
        let device = Device::cpu(plan.train.threads);
        let run =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let (mut rank, done) = build(&run, &mut |_| {}).unwrap();
        let generation = lockstep_ckpt::newest(folder).unwrap();
        let mut saver = Saver::new(plan, &world, folder, generation, disk.clone());
        for step in done + 1..=to {
            rank.step(source, step).unwrap();
        }
        saver.begin(&rank, to, Position::default()).unwrap();
        // One more step while the save is under way.
        rank.step(source, to + 1).unwrap();
        let word = agree(&world, saver.word()).unwrap();
        let ended = saver.heard(word).unwrap();
        let ended = match ended {
            None => saver.finish().unwrap(),
            ended => ended,
        };
        (masters(&rank), ended)
    })
    .remove(0)
}

/// A disk that is gone from some act on, for all ranks: they are dead. And how many acts there were.
fn dying(after: usize) -> (Disk, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let acts = count.clone();
    let disk = Disk::with_hook(move |_| match acts.fetch_add(1, Ordering::SeqCst) < after {
        true => Ok(()),
        false => Err(IoError::other("the machine is gone")),
    });
    (disk, count)
}

fn copied(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copied(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn a_training_resumes_from_whatever_a_crash_leaves() {
    let (whole, base) = (folder("crash-whole"), folder("crash-base"));
    let (uninterrupted, told) = train(&small("train.steps=6"), &whole, false);
    assert_eq!(told, ["saved 2", "saved 4", "saved 6"]);
    train(&small("train.steps=2"), &base, false);

    let plan = small("train.steps=6");
    let (disk, count) = dying(usize::MAX);
    let place = folder("crash-all");
    copied(&base, &place);
    let (_, ended) = save_on(&disk, &plan, &place, 4);
    assert!(matches!(ended, Some(SaveOutcome::Saved(_))), "{ended:?}");
    let acts = count.load(Ordering::SeqCst);
    assert!(acts > 20, "{acts}");

    // Some of the many writes, and all that comes after them.
    let points: Vec<usize> = (0..acts - 8).step_by(acts / 12).chain(acts - 8..=acts).collect();
    let mut from = [0, 0];
    for after in points {
        let place = folder("crash-at");
        copied(&base, &place);
        let (_, ended) = save_on(&dying(after).0, &plan, &place, 4);
        if after < acts - 1 {
            assert!(
                matches!(ended, Some(SaveOutcome::Failed { .. })),
                "{after} of {acts}: {ended:?}"
            );
        }
        let newest = steps(&place)[0];
        from[usize::from(newest == 4)] += 1;
        assert!(newest == 2 || newest == 4, "{after} of {acts}: {newest}");
        let (resumed, told) = train(&plan, &place, true);
        assert!(resumed == uninterrupted, "{after} of {acts}: the same to the bit");
        assert!(told.iter().all(|told| told.starts_with("saved")), "{told:?}");
    }
    assert!(from.iter().all(|count| *count > 0), "the old and the new were met: {from:?}");
}

#[test]
fn a_full_disk_fails_a_save_alone() {
    let (whole, place) = (folder("full-whole"), folder("full"));
    let plan = small("train.steps=5");
    let (five, _) = train(&plan, &whole, false);
    train(&small("train.steps=2"), &place, false);
    // Only rank 1's file does not fit.
    let disk = Disk::with_hook(|act| match act {
        DiskOp::Write(path, bytes)
            if path.ends_with("rank-00001.safetensors") && bytes.len() > 99 =>
        {
            Err(IoError::from(ErrorKind::StorageFull))
        }
        _ => Ok(()),
    });
    let (went_on, ended) = save_on(&disk, &plan, &place, 4);
    let Some(SaveOutcome::Failed { step: 4, rank: 1, what }) = ended else { panic!("{ended:?}") };
    assert!(what.contains("rank-00001.safetensors") && what.contains("no storage space"), "{what}");
    assert!(went_on == five, "the training went on as if nothing had been saved");
    assert_eq!(steps(&place), [2], "the checkpoint before stands");
    let left = std::fs::read_dir(place.join("checkpoints")).unwrap().count();
    assert_eq!(left, 1, "nothing is left of the other");
    let (resumed, _) = train(&plan, &place, true);
    assert!(resumed == five);
}

#[test]
fn a_broken_checkpoint_is_passed_over_and_saved_again() {
    let (whole, place) = (folder("passed-whole"), folder("passed"));
    let plan = small("train.steps=6");
    let (uninterrupted, _) = train(&plan, &whole, false);
    train(&small("train.steps=4"), &place, false);
    let path = lockstep_ckpt::folder(&place, 4).join("rank-00001.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&path, bytes).unwrap();

    let (resumed, told) = train(&plan, &place, true);
    let passed = &told[0];
    assert!(passed.starts_with("passed over") && passed.contains("step-00000004"), "{told:?}");
    assert!(passed.contains("rank-00001.safetensors is corrupt at byte 0"), "{told:?}");
    assert_eq!(told[1..], ["saved 4", "saved 6"], "the broken one was replaced");
    assert!(resumed == uninterrupted);
    for step in steps(&place) {
        let checkpoint = lockstep_ckpt::load(&lockstep_ckpt::folder(&place, step)).unwrap();
        assert!(checkpoint.check(|_| {}).is_empty(), "step {step}");
    }
}

#[test]
fn a_rank_that_was_given_up_commits_nothing() {
    let place = folder("given-up");
    let plan = small("train.steps=5");
    train(&small("train.steps=2"), &place, false);
    // Somebody else takes the run over while this one's save is about to be committed.
    let taken = place.clone();
    let disk = Disk::with_hook(move |act| {
        if matches!(act, DiskOp::Create(path) if path.ends_with("manifest.json")) {
            claim(&taken, 99).unwrap();
        }
        Ok(())
    });
    let (_, ended) = save_on(&disk, &plan, &place, 4);
    let Some(SaveOutcome::Failed { rank: 0, what, .. }) = ended else { panic!("{ended:?}") };
    assert!(what.contains("generation 99 trains this run now"), "{what}");
    assert_eq!(steps(&place), [2]);
}

/// A save that is due while another is under way waits for it; both are there in the end.
#[test]
fn saves_do_not_overtake_each_other() {
    let place = folder("every-step");
    let sets =
        ["checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3", "train.steps=7"];
    let (_, told) = train(&plan(2, &sets), &place, false);
    let all: Vec<String> = (1..=7).map(|step| format!("saved {step}")).collect();
    assert_eq!(told, all);
    assert_eq!(steps(&place), [7, 6, 3], "the last two, and every third");

    let metrics = lockstep_events::read(&place.join("metrics.jsonl")).unwrap();
    let saved: Vec<u64> =
        metrics.iter().filter_map(|line| line.more.get("saved_step")?.as_u64()).collect();
    assert_eq!(saved, [1, 2, 3, 4, 5, 6, 7]);
    let stalls = metrics.iter().filter(|line| line.more.contains_key("save_stall_s")).count();
    assert_eq!(stalls, 7);
}

/// A rank by itself saves as many do.
#[test]
fn one_rank_saves_and_resumes() {
    let (whole, place) = (folder("alone-whole"), folder("alone-halves"));
    let alone = |steps: &str| plan(1, &["train.schedule=constant", steps]);
    let (uninterrupted, _) = train(&alone("train.steps=5"), &whole, false);
    train(&alone("train.steps=3"), &place, false);
    let (resumed, _) = train(&alone("train.steps=5"), &place, true);
    assert!(uninterrupted == resumed);
    let fresh = on_threads(1, |world| {
        masters(&Rank::new(&alone("train.steps=5"), &world, Device::cpu(1)).unwrap())
    });
    assert!(fresh[0] != resumed, "it has trained");
}
