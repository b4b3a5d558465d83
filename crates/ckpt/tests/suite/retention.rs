//! Which checkpoints are removed, and which count.

use crate::state::{head, mesh, save_by, saved};
use crate::support::fresh;
use lockstep_ckpt::{Disk, Keep, Retention, claim, folder, progress_since, prune, steps};
use std::fs;
use std::path::{Path, PathBuf};

fn run(name: &str, steps: &[u64]) -> PathBuf {
    let run = fresh(name);
    steps.iter().for_each(|step| drop(saved(&run, *step)));
    run
}

/// Flips a byte, which changes no size.
fn corrupt(run: &Path, step: u64) {
    let path = folder(run, step).join("rank-00001.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn corrupt_checkpoints_do_not_displace_good_ones() {
    let run = run("hidden", &[54, 57, 60, 87, 90]);
    [87, 90].into_iter().for_each(|step| corrupt(&run, step));
    // A run that resumed from step 60 saves on.
    let mut retention = Retention::new(Keep { newest: 2, every: 0 });
    retention.trust(60);
    for (step, left) in [(63, [90, 87, 63, 60]), (66, [90, 87, 66, 63])] {
        saved(&run, step);
        retention.trust(step);
        retention.prune(&Disk::default(), &run).unwrap();
        assert_eq!(steps(&run), left);
    }
    // A process that knows nothing about them reads them.
    prune(&Disk::default(), &run, Keep { newest: 1, every: 0 }).unwrap();
    assert_eq!(steps(&run), [90, 87, 66]);
    // At step 90 the corrupt one is replaced, and the rest is old.
    saved(&run, 90);
    prune(&Disk::default(), &run, Keep { newest: 1, every: 0 }).unwrap();
    assert_eq!(steps(&run), [90]);
}

#[test]
fn room_is_made_without_removing_the_last_good_checkpoint() {
    for (newest, every, left) in [
        (3, 0, &[40, 30, 20][..]),
        (2, 0, &[40, 30]),
        (2, 10, &[40, 30, 20, 10]),
        (1, 0, &[40, 30]),
        (0, 0, &[40, 30, 20, 10]),
    ] {
        let run = run("room", &[10, 20, 30, 40]);
        corrupt(&run, 40);
        let mut retention = Retention::new(Keep { newest, every });
        let removed = retention.make_room(&Disk::default(), &run).unwrap();
        assert_eq!(steps(&run), left, "keep {newest} and every {every}");
        assert_eq!(removed.len() + left.len(), 4);
    }
}

#[test]
fn only_checkpoints_of_new_generations_are_progress() {
    let run = run("progress", &[60, 90]);
    claim(&run, 5).unwrap();
    assert_eq!(progress_since(&run, 5), 0);
    let save = |step, generation| {
        let all = Keep { newest: 0, every: 0 };
        save_by(&Disk::default(), &run, &mesh(), &head(step, generation), all).unwrap()
    };
    save(63, 5);
    assert_eq!(progress_since(&run, 5), 63, "step 90 is older");
    claim(&run, 6).unwrap();
    save(66, 6);
    assert_eq!(progress_since(&run, 5), 66);
}
