//! Checkpoints: a resumed training ends with the bytes of an undisturbed one, on any number of ranks.

use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_comm::on_threads_with;
use lockstep_gbdt::{
    Checkpoint, Config, Event, Finished, Generate, Objective, Params, Result, Run, Team, run,
};

use crate::support::{Folder, options};

fn config(params: Params) -> Config {
    let mut config = Config { trees: params, ..Config::default() };
    config.data.generate =
        Some(Generate { rows: 3000, eval_rows: 1000, missing: 0.1, ..Generate::default() });
    (config.run.checkpoint_every, config.run.report_every) = (3, 1);
    config
}

fn params() -> Params {
    Params {
        objective: Objective::Logistic,
        rounds: 12,
        max_depth: 3,
        subsample: 0.8,
        colsample_bynode: 0.7,
        early_stopping: 50,
        ..Params::default()
    }
}

/// Runs on `ranks` ranks; is asked to stop after `stop_after` rounds.
fn start(
    folder: &Folder,
    config: &Config,
    ranks: usize,
    resume: bool,
    stop_after: usize,
) -> Vec<Result<Finished>> {
    on_threads_with(&options(), ranks, |world| {
        let rounds = AtomicUsize::new(0);
        let first = world.rank() == 0;
        run(
            &Run {
                group: &world,
                team: &Team::new(1),
                config,
                folder: &folder.0,
                resume,
                generation: 1,
                // Only one rank is asked, and all stop.
                stop: &|| first && rounds.fetch_add(1, Ordering::Relaxed) + 1 >= stop_after,
            },
            &mut |event| drop::<Event<'_>>(event),
        )
    })
}

fn bytes(folder: &Folder) -> Vec<u8> {
    std::fs::read(folder.0.join("model.ubj")).unwrap()
}

#[test]
fn a_resumed_run_ends_with_the_same_bytes() {
    let config = config(params());
    let whole = Folder::new("whole");
    start(&whole, &config, 2, false, usize::MAX)
        .into_iter()
        .for_each(|end| assert!(!end.unwrap().stopped));
    let rounds = Checkpoint::rounds(&whole.0);
    assert_eq!(rounds, [12, 9]);
    for (case, ranks) in [(1, [1, 3]), (2, [3, 2]), (7, [2, 1])] {
        let folder = Folder::new(&format!("resumed-{case}"));
        let ends = start(&folder, &config, ranks[0], false, case);
        assert!(ends.into_iter().all(|end| end.unwrap().stopped));
        assert!(!folder.0.join("model.ubj").exists());
        start(&folder, &config, ranks[1], true, usize::MAX)
            .into_iter()
            .for_each(|end| assert!(!end.unwrap().stopped));
        assert!(bytes(&folder) == bytes(&whole), "stopped after {case} rounds");
        let steps = lockstep_events::read(&folder.0.join("metrics.jsonl")).unwrap();
        let steps: Vec<usize> = steps.iter().map(|step| step.step).collect();
        assert_eq!(steps, (1..=12).collect::<Vec<_>>());
    }
}

#[test]
fn a_corrupt_checkpoint_is_skipped() {
    let config = config(params());
    let folder = Folder::new("corrupt");
    start(&folder, &config, 1, false, usize::MAX).remove(0).unwrap();
    let expected = bytes(&folder);
    let newest = folder.0.join("checkpoints/round-00000012.json");
    let mut damaged = std::fs::read(&newest).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 4;
    std::fs::write(&newest, &damaged).unwrap();
    std::fs::remove_file(folder.0.join("model.ubj")).unwrap();
    start(&folder, &config, 2, true, usize::MAX).into_iter().for_each(|end| drop(end.unwrap()));
    assert!(bytes(&folder) == expected);
}

#[test]
fn other_parameters_cannot_continue() {
    let folder = Folder::new("other");
    start(&folder, &config(params()), 1, false, 2).remove(0).unwrap();
    let other = config(Params { eta: 0.1, ..params() });
    let error = start(&folder, &other, 1, true, usize::MAX).remove(0).err().unwrap().to_string();
    assert!(error.contains("other parameters or other data"), "{error}");
    let longer = config(Params { rounds: 20, ..params() });
    let end = start(&folder, &longer, 1, true, usize::MAX).remove(0).unwrap();
    assert_eq!(end.model.rounds(), 20);
}

#[test]
fn early_stopping_keeps_the_best_round() {
    let params = Params { rounds: 500, eta: 1.0, max_depth: 8, early_stopping: 5, ..params() };
    let alone = Folder::new("early-1");
    let end = start(&alone, &config(params.clone()), 1, false, usize::MAX).remove(0).unwrap();
    let best = end.model.best_round.unwrap();
    assert_eq!(end.model.rounds(), best + 1 + 5);
    assert!(end.model.rounds() < 500);
    let three = Folder::new("early-3");
    start(&three, &config(params), 3, false, usize::MAX)
        .into_iter()
        .for_each(|end| drop(end.unwrap()));
    assert!(bytes(&alone) == bytes(&three));
}

#[test]
fn an_older_generation_may_not_write() {
    let folder = Folder::new("fenced");
    lockstep_ckpt::claim(&folder.0, 5).unwrap();
    let error = start(&folder, &config(params()), 1, false, usize::MAX).remove(0).err().unwrap();
    assert!(error.to_string().contains("generation 1 may not write"), "{error}");
}
