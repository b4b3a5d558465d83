//! Complete and incomplete checkpoints.

use crate::state::{self, KINDS, head, holds, mesh, save_by, saved, shape, value};
use crate::support::{FIXTURES, fixture, fresh, same};
use lockstep_ckpt::hf::Source;
use lockstep_ckpt::{
    Disk, Error, Keep, Runs, TensorKind, Tensors, advance, claim, diff, find, find_step, latest,
    load, newest, prune, save, steps, sweep,
};
use lockstep_plan::Mesh;
use lockstep_plan::model::Part;
use std::fs;
use std::path::{Path, PathBuf};

const ALL: Keep = Keep { newest: 0, every: 0 };

/// A run with one checkpoint for each step.
fn run(name: &str, steps: &[u64]) -> PathBuf {
    let run = fresh(name);
    steps.iter().for_each(|step| drop(saved(&run, *step)));
    run
}

#[test]
fn imported_weights_are_loaded() {
    for name in FIXTURES {
        let source = Source::open(&fixture(name)).unwrap();
        let run = fresh(&format!("saved-{name}"));
        let dir = save(&run, source.shape(), &source).unwrap();
        assert_eq!(dir, run.join("checkpoints/step-00000000"));
        let checkpoint = load(&dir).unwrap();
        assert_eq!((checkpoint.head().step, &checkpoint.head().shape), (0, source.shape()));
        same(&checkpoint.params(), &source);
        assert!(checkpoint.tensors(TensorKind::First).is_none());
        assert!(checkpoint.check(|_| {}).is_empty());
    }
}

/// Meshes that write and read: slices by row and by column, replicas, shards.
fn meshes() -> Vec<Mesh> {
    vec![
        Mesh::ONE,
        Mesh { data: 3, ..Mesh::ONE },
        Mesh { data: 4, shard: 2, ..Mesh::ONE },
        Mesh { tensor: 4, ..Mesh::ONE },
        Mesh { pipe: 2, ..Mesh::ONE },
        Mesh { pipe: 2, data: 2, shard: 2, tensor: 2, ..Mesh::ONE },
    ]
}

#[test]
fn any_mesh_reads_what_any_mesh_wrote() {
    for (number, writers) in meshes().into_iter().enumerate() {
        let run = fresh(&format!("meshes-{number}"));
        let head = head(3, 0);
        let dir = save_by(&Disk::default(), &run, &writers, &head, ALL).unwrap();
        let checkpoint = load(&dir).unwrap();
        assert_eq!(checkpoint.head(), &head);
        assert_eq!(checkpoint.manifest().files.len(), writers.ranks());
        holds(&checkpoint, 3);
        for readers in meshes() {
            for rank in 0..readers.ranks() {
                let part = Part::new(&readers, readers.coord(rank), 1, shape().blocks());
                for slice in part.slices() {
                    let mut found = vec![0.0; slice.here.len()];
                    for kind in KINDS {
                        checkpoint.read(kind, &slice.name, &slice.runs, &mut found).unwrap();
                        let elements = slice.runs.iter().flat_map(|runs| runs.ranges()).flatten();
                        for (found, element) in found.iter().zip(elements) {
                            assert_eq!(*found, value(3, kind, &slice.name, element));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn residuals_are_summed_over_ranks() {
    let run = fresh("residuals");
    let disk = Disk::default();
    let folder = lockstep_ckpt::begin(&disk, &run, 1, 0).unwrap();
    // Two writers have different residuals of one tensor, which are summed on load. A third has a copy of the first's,
    // which does not count.
    let named = lockstep_ckpt::params_of(&shape()).remove(0);
    let mut parts = Vec::new();
    for (writer, counts) in [true, true, false].into_iter().enumerate() {
        let mut pieces = if writer == 0 { state::pieces(&Mesh::ONE, 0) } else { vec![] };
        let runs = vec![Runs::one(0..named.len())];
        pieces.push(lockstep_ckpt::Piece {
            kind: TensorKind::Residual,
            named: named.clone(),
            runs,
            counts,
        });
        let written =
            lockstep_ckpt::write_pieces(&disk, &folder, writer, &pieces, 1000, |number| {
                let residual = number + 1 == pieces.len();
                let value =
                    |at: usize| if residual { (writer + 1) as f32 * at as f32 } else { 0.5 };
                Ok((0..pieces[number].len()).map(value).collect::<Vec<f32>>().into())
            });
        parts.push(written.unwrap());
    }
    let manifest = lockstep_ckpt::Manifest::of(head(1, 0), 1000, parts);
    let checkpoint = load(&lockstep_ckpt::commit(&disk, &run, &manifest).unwrap()).unwrap();
    let runs = [Runs::one(3..5), Runs { start: 8, len: 1, stride: 3, count: 2 }];
    let mut out = [0.0; 4];
    checkpoint.sum_over_ranks(TensorKind::Residual, &named.name, &runs, &mut out).unwrap();
    assert_eq!(out, [9.0, 12.0, 24.0, 33.0]);
    assert!(
        checkpoint.read_of_rank(TensorKind::Residual, 1, &named.name, &runs, &mut out).unwrap()
    );
    assert_eq!(out, [6.0, 8.0, 16.0, 22.0]);
    assert!(
        checkpoint.read_of_rank(TensorKind::Residual, 2, &named.name, &runs, &mut out).unwrap()
    );
    assert!(
        !checkpoint.read_of_rank(TensorKind::Residual, 7, &named.name, &runs, &mut out).unwrap()
    );
    assert!(
        !checkpoint
            .read_of_rank(TensorKind::Residual, 1, "embed.positions", &runs, &mut out)
            .unwrap()
    );
}

#[test]
fn newest_complete_checkpoint_is_found() {
    let run = run("newest", &[5, 100, 20]);
    let checkpoints = run.join("checkpoints");
    let newest = checkpoints.join("step-00000100");
    assert_eq!(steps(&run), [100, 20, 5]);
    assert_eq!(latest(&run).unwrap(), Some(newest.clone()));
    assert_eq!(find(&run).unwrap(), newest);
    let fifth = checkpoints.join("step-00000005");
    assert_eq!(find(&fifth).unwrap(), fifth);
    assert_eq!(find_step(&run, 5).unwrap(), fifth);
    let error = find_step(&run, 6).unwrap_err().to_string();
    assert!(error.contains("no checkpoint of step 6; existing steps: 100, 20, 5"), "{error}");

    // Files of a killed save, and unrelated files.
    let killed = checkpoints.join(".step-00000200.g1.partial");
    fs::create_dir(&killed).unwrap();
    fs::copy(newest.join("manifest.json"), killed.join("manifest.json")).unwrap();
    fs::create_dir(checkpoints.join("step-notes")).unwrap();
    assert_eq!(latest(&run).unwrap(), Some(newest.clone()));

    // An incomplete copy.
    fs::remove_file(newest.join("rank-00002.safetensors")).unwrap();
    assert_eq!(latest(&run).unwrap(), Some(checkpoints.join("step-00000020")));
    // The step is trained and saved again.
    holds(&load(&saved(&run, 100)).unwrap(), 100);
    assert_eq!(latest(&run).unwrap(), Some(newest));
}

#[test]
fn sweep_removes_only_remains_of_interrupted_saves() {
    let run = run("swept", &[5, 100]);
    let checkpoints = run.join("checkpoints");
    // A killed save, a killed prune, and files of the user.
    for name in [".step-00000200.g3.partial", "step-00000003.removed", "step-notes", "old.removed"]
    {
        fs::create_dir(checkpoints.join(name)).unwrap();
        fs::write(checkpoints.join(name).join("manifest.json"), "{}").unwrap();
    }
    sweep(&run).unwrap();
    assert_eq!(
        names(&checkpoints),
        ["old.removed", "step-00000005", "step-00000100", "step-notes"]
    );
    sweep(&fresh("never-swept")).unwrap();
}

#[test]
fn pruning_keeps_the_newest_and_every_nth() {
    for (newest, every, left) in [
        (0, 0, &[5, 7, 10, 20, 100][..]),
        (2, 0, &[20, 100]),
        (1, 10, &[10, 20, 100]),
        (1, 5, &[5, 10, 20, 100]),
        (9, 0, &[5, 7, 10, 20, 100]),
    ] {
        let run = run("pruned", &[5, 100, 20, 7, 10]);
        prune(&Disk::default(), &run, Keep { newest, every }).unwrap();
        let mut found = steps(&run);
        found.reverse();
        assert_eq!(found, left, "{newest} and every {every}");
        assert_eq!(names(&run.join("checkpoints")).len(), left.len(), "nothing else is left");
    }
}

/// Names in the manifest have changed since; see README.md of the fixture.
#[test]
fn a_checkpoint_of_an_older_version_loads() {
    let dir = fixture("../checkpoint");
    let checkpoint = load(&dir).unwrap();
    assert!(checkpoint.check(|_| {}).is_empty());
    let head = checkpoint.head();
    assert_eq!((head.step, head.position.samples, head.extra.skipped_samples), (6, 12, 15));
    for kind in TensorKind::ALL {
        assert!(checkpoint.tensors(kind).is_some(), "{kind}");
    }
    let named = checkpoint.params().list()[0].clone();
    let (runs, mut values) = ([Runs::one(0..named.len())], vec![0.0; named.len()]);
    for kind in [TensorKind::Residual, TensorKind::Magnitude] {
        assert!(checkpoint.read_of_rank(kind, 1, &named.name, &runs, &mut values).unwrap());
        assert!(values.iter().any(|value| *value != 0.0), "{kind}");
    }
    // The ledger of a learner, as it was saved.
    let ledger: lockstep_ckpt::rollouts::Ledger = serde_json::from_str(
        r#"{"policy_version":3,"max_lag":2,"window":8,
            "producers":{"a":{"cursor":5,"window":[7],"given_up":{"1":2}}},
            "told":{"accepted":4,"stale":1,"duplicate":0,"future_version":1}}"#,
    )
    .unwrap();
    assert_eq!((ledger.counts().accepted, ledger.cursor("a")), (4, 5));
}

/// Entries of a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn missing_and_broken_checkpoints_give_different_errors() {
    let run = run("broken", &[1, 2]);
    assert_eq!(latest(&fresh("never")).unwrap(), None);
    let error = find(&fresh("never")).unwrap_err().to_string();
    assert!(error.contains("pass a run folder or a checkpoint folder"), "{error}");
    for step in 1..=2 {
        fs::remove_file(run.join(format!("checkpoints/step-0000000{step}/manifest.json"))).unwrap();
    }
    let error = latest(&run).unwrap_err().to_string();
    assert!(error.contains("step-00000002"), "{error}");
}

#[test]
fn import_never_overwrites_and_cleans_up_on_failure() {
    let source = Source::open(&fixture("llama")).unwrap();
    let run = fresh("twice");
    // Reading one tensor fails during the save.
    struct Failing<'a>(&'a Source);
    impl Tensors for Failing<'_> {
        fn list(&self) -> &[lockstep_ckpt::Named] {
            self.0.list()
        }
        fn read(&self, name: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
            assert!(name != "layers.1.norm1.gain", "struck down");
            self.0.read(name, out)
        }
    }
    let failing = || save(&run, source.shape(), &Failing(&source));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(failing)).is_err());
    assert!(names(&run.join("checkpoints")).is_empty());

    save(&run, source.shape(), &source).unwrap();
    let error = save(&run, source.shape(), &source).unwrap_err().to_string();
    assert!(error.contains("already exists"), "{error}");
}

/// A rank of an old generation cannot commit.
#[test]
fn an_older_generation_cannot_commit() {
    let run = fresh("fenced");
    assert_eq!(newest(&run).unwrap(), 0);
    assert_eq!((advance(&run).unwrap(), newest(&run).unwrap()), (1, 1));
    let save =
        |step, generation| save_by(&Disk::default(), &run, &mesh(), &head(step, generation), ALL);
    save(1, 1).unwrap();
    claim(&run, 4).unwrap();
    claim(&run, 4).unwrap();
    let error = save(2, 1).unwrap_err();
    assert!(matches!(error, Error::Fenced { generation: 1, newest: 4, .. }), "{error}");
    assert!(error.to_string().contains("generation 4 trains this run now"), "{error}");
    assert_eq!(steps(&run), [1]);
    assert!(matches!(claim(&run, 3), Err(Error::Fenced { .. })));
    save(2, 4).unwrap();
    assert_eq!(steps(&run), [2, 1]);
    assert_eq!(advance(&run).unwrap(), 5);

    fs::write(run.join("generation"), "many").unwrap();
    let error = advance(&run).unwrap_err().to_string();
    assert!(error.contains("expected a number"), "{error}");
}

#[test]
fn differences_are_found_across_layouts() {
    let (one, other) = (fresh("diff-one"), fresh("diff-other"));
    let disk = Disk::default();
    let a = save_by(&disk, &one, &Mesh::ONE, &head(1, 0), ALL).unwrap();
    let b = save_by(&disk, &other, &mesh(), &head(1, 0), ALL).unwrap();
    let (a, b) = (load(&a).unwrap(), load(&b).unwrap());
    assert_eq!(diff(&a, &b).count(), 0, "another layout, the same numbers");
    let c = load(&save_by(&disk, &other, &mesh(), &head(2, 0), ALL).unwrap()).unwrap();
    let apart: Vec<_> = diff(&a, &c).map(Result::unwrap).collect();
    assert_eq!(apart.len(), 3 * lockstep_ckpt::params_of(&shape()).len());
    let first = &apart[0];
    let name = first.name.as_str();
    assert_eq!(first.first, (0, value(1, first.kind, name, 0), value(2, first.kind, name, 0)));
    let far = (0..first.of).map(|at| {
        (f64::from(value(1, first.kind, name, at)) - f64::from(value(2, first.kind, name, at)))
            .abs()
    });
    assert_eq!(first.max_abs, Some(far.fold(0.0, f64::max)));
}
