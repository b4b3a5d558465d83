//! A checkpoint of any layout can be loaded on any other: the state is bit-identical, and training continues with the
//! next sample.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{Disk, Position, Runs, TensorKind};
use lockstep_comm::on_threads;
use lockstep_data::SampleId;
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Rank, Run, SaveOutcome, Saver, Snapshot, Start, build, train_sample};

use crate::cuts;
use crate::plans::source;

const STEPS: u64 = 2;

/// All axes, ZeRO levels, pipeline schedules and expert degrees.
const EXPERTS: [&str; 11] = [
    "moe",
    "moe data=3",
    "moe data=2 zero=1",
    "moe data=4 zero=3 shard=2",
    "moe data=2 expert=2 zero=3",
    "moe data=4 expert=4 zero=2",
    "moe tensor=2 sequence=true",
    "moe tensor=4",
    "moe data=2 zero=2 pipe=2 schedule=interleaved",
    "moe pipe=4 schedule=zb-h1",
    "moe tensor=2 context=2 expert=2 pipe=2",
];

/// Tied embeddings: the first and the last stage both hold the token table.
const TIED: [&str; 11] = [
    "gpt2",
    "gpt2 data=3",
    "gpt2 data=2 zero=1",
    "gpt2 data=4 zero=2 shard=2",
    "gpt2 data=3 zero=3",
    "gpt2 tensor=3 sequence=true",
    "gpt2 tensor=4",
    "gpt2 pipe=3 schedule=zb-h2",
    "gpt2 data=2 zero=3 tensor=2 pipe=2",
    "gpt2 context=2 zero=1",
    "gpt2 data=2 pipe=2 schedule=interleaved precision.compute=bf16",
];

pub type State = BTreeMap<(TensorKind, String), Vec<f32>>;

/// Full state from the snapshots of all ranks. Each element occurs once; residuals of ranks are summed.
pub fn assemble(snapshots: &[Snapshot]) -> State {
    let mut state = State::new();
    for snapshot in snapshots {
        let (pieces, mut rest) = (&snapshot.pieces, snapshot.values());
        for piece in pieces {
            let (values, tail) = rest.split_at(piece.len());
            rest = tail;
            let per_rank = piece.kind.is_per_rank();
            let start = if per_rank { 0.0 } else { f32::NAN };
            let tensor = state
                .entry((piece.kind, piece.named.name.clone()))
                .or_insert_with(|| vec![start; piece.named.len()]);
            if !piece.counts {
                continue;
            }
            let elements = piece.runs.iter().flat_map(|runs| runs.ranges()).flatten();
            for (element, value) in elements.zip(values) {
                let name = &piece.named.name;
                assert!(
                    per_rank || tensor[element].is_nan(),
                    "{name}: {element} was written twice"
                );
                tensor[element] = if per_rank { tensor[element] + value } else { *value };
            }
        }
    }
    assert!(state.values().flatten().all(|value| !value.is_nan()), "an element is missing");
    state
}

pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Trains a few steps and saves a checkpoint. Returns the snapshot of each rank.
fn trained(plan: &Plan, folder: &Path) -> Vec<Snapshot> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let mut rank = Rank::new(plan, &world, Device::from_env(1)).unwrap();
        for step in 1..=STEPS {
            rank.step(&source, step).unwrap();
        }
        let mut saver = Saver::new(plan, &world, folder, 0, Disk::default());
        let samples = STEPS * plan.train.global_batch as u64;
        let (seed, data) = (plan.train.seed, source.identity());
        let position = Position { samples, seed, data, first_batch_used: true };
        assert!(saver.begin(&rank, STEPS, position).unwrap().is_none());
        let outcome = saver.finish().unwrap();
        assert!(matches!(outcome, Some(SaveOutcome::Saved(_))), "{outcome:?}");
        rank.snapshot(Snapshot::default()).completed()
    })
}

/// Resumes from the checkpoint in `folder`. Returns the snapshot of each rank.
fn loaded(plan: &Plan, folder: &Path) -> Vec<Snapshot> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = Some(Start { checkpoint: folder.to_path_buf(), resume: true });
        let (source, stop) = (&source, &|| false);
        let device = Device::from_env(plan.train.threads);
        let run =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let (rank, done) = build(&run, &mut |_| {}).unwrap();
        assert_eq!(done, STEPS);
        rank.snapshot(Snapshot::default()).completed()
    })
}

/// Sorted numbers of the samples that all replicas read in a step.
fn sample_numbers(plan: &Plan, step: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = samples_of_step(plan, step)
        .iter()
        .map(|id| id.batch * id.global_batch as u64 + id.index as u64)
        .collect();
    numbers.sort_unstable();
    numbers
}

/// The samples that all replicas read in a step.
pub fn samples_of_step(plan: &Plan, step: u64) -> Vec<SampleId> {
    let mut samples = Vec::new();
    for data in 0..plan.layout.data {
        for micro in 0..plan.train.accumulation {
            let first = plan.first_sample(data, micro);
            let rows = first..first + plan.train.micro_batch;
            samples.extend(rows.map(|index| train_sample(plan, step, index)));
        }
    }
    samples
}

fn all_pairs_reshard(layouts: &[&str], name: &str) {
    for (number, from) in layouts.iter().enumerate() {
        let (plan, folder) = (cuts::plan(from), folder(&format!("reshard-{name}-{number}")));
        let before = assemble(&trained(&plan, &folder));
        assert_eq!(before.len(), 3 * lockstep_ckpt::params_of(&plan.model).len(), "{from}");
        let checkpoint = lockstep_ckpt::load(&lockstep_ckpt::find(&folder).unwrap()).unwrap();
        let used = checkpoint.head().position.samples;
        for to in layouts {
            let plan = cuts::plan(to);
            let after = assemble(&loaded(&plan, &folder));
            for (key, before) in &before {
                let same = before.iter().zip(&after[key]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && before.len() == after[key].len(), "{from} to {to}: {key:?}");
            }
            let next: Vec<u64> = (used..used + plan.train.global_batch as u64).collect();
            assert_eq!(sample_numbers(&plan, STEPS + 1), next, "{from} to {to}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn experts_reshard_between_all_layouts() {
    all_pairs_reshard(&EXPERTS, "experts");
}

/// The next step balances experts with the slots of the last one, so they are part of the state.
#[test]
fn balance_over_the_batch_continues_on_another_layout() {
    const MODEL: &str = "moe model.balance=batch model.aux_loss=1.0 model.top_k=2 train.lr=3e-3";
    let layouts = ["", "data=2 train.micro_batch=3", "data=2 expert=2 pipe=2", "context=2 zero=3"];
    // The router's first moments after one more step, which starts from `folder` or from scratch.
    let router = |words: &str, folder: Option<&Path>| -> Vec<f32> {
        let (plan, source) = (cuts::plan(&format!("{MODEL} {words}")), source());
        let newest = |folder| lockstep_ckpt::load(&lockstep_ckpt::find(folder).unwrap()).unwrap();
        let checkpoint = folder.map(newest);
        let snapshots = on_threads(plan.ranks, |world| {
            let (device, first) =
                (Device::from_env(1), if folder.is_some() { STEPS + 1 } else { 1 });
            let mut rank = match &checkpoint {
                Some(checkpoint) => Rank::resume(&plan, &world, device, checkpoint).unwrap(),
                None => Rank::new(&plan, &world, device).unwrap(),
            };
            for step in first..=STEPS + 1 {
                rank.step(&source, step).unwrap();
            }
            rank.snapshot(Snapshot::default()).completed()
        });
        assemble(&snapshots)[&(TensorKind::First, "layers.0.router.weight".into())].clone()
    };
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let right = router("", None);
    for (number, from) in layouts.iter().enumerate() {
        let folder = folder(&format!("reshard-balance-{number}"));
        trained(&cuts::plan(&format!("{MODEL} {from}")), &folder);
        for to in layouts {
            let ours = router(to, Some(&folder));
            let difference = norm(&mut ours.iter().zip(&right).map(|(a, b)| a - b));
            let error = difference / norm(&mut right.iter().copied());
            assert!(error < 1e-4, "{from} to {to}: moments of the router differ by {error}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn tied_embeddings_reshard_between_all_layouts() {
    all_pairs_reshard(&TIED, "tied");
}

/// Residuals of compression are bit-identical on the same layout; on another layout their sum is.
#[test]
fn residuals_reshard() {
    let layouts = [
        "llama data=4 comm.compression=int8",
        "llama data=2 zero=2 comm.compression=int8",
        "llama data=3 comm.compression=topk:0.01 comm.compression_warmup=0 comm.bucket_mb=0.05",
        "llama data=2 tensor=2 sequence=true comm.compression=bf16",
        "llama data=2 tensor=4 zero=1 pipe=2 comm.compression=bf16",
    ];
    for (number, from) in layouts.iter().enumerate() {
        let (plan, folder) = (cuts::plan(from), folder(&format!("reshard-residual-{number}")));
        let written = trained(&plan, &folder);
        let before = assemble(&written);
        let residuals = |state: &State| -> State {
            state
                .iter()
                .filter(|((kind, _), _)| *kind == TensorKind::Residual)
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect()
        };
        assert!(
            residuals(&before).values().flatten().any(|value| *value != 0.0),
            "{from}: all residuals are zero"
        );
        let again = loaded(&plan, &folder);
        for (rank, (one, other)) in written.iter().zip(&again).enumerate() {
            assert!(
                one.pieces == other.pieces && one.values() == other.values(),
                "{from}: rank {rank}"
            );
        }
        for to in layouts.iter().filter(|to| *to != from) {
            let after = assemble(&loaded(&cuts::plan(to), &folder));
            assert_eq!(residuals(&before), residuals(&after), "{from} to {to}");
        }
        // A single rank has no residuals; the rest of the state is loaded.
        let one_rank = assemble(&loaded(&cuts::plan("llama"), &folder));
        assert!(residuals(&one_rank).is_empty());
        assert!(one_rank.iter().all(|(key, value)| &before[key] == value));
        std::fs::remove_dir_all(folder).unwrap();
    }
}

/// Corrupt data that a rank does not need does not affect it.
#[test]
fn a_rank_reads_only_its_shards() {
    let (plan, folder) = (cuts::plan("gpt2 pipe=2"), folder("reshard-partial"));
    trained(&plan, &folder);
    let dir = lockstep_ckpt::find(&folder).unwrap();
    // File of the last stage.
    let path = dir.join("rank-00001.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let checkpoint = lockstep_ckpt::load(&dir).unwrap();
    for rank in 0..2 {
        let part = plan.part(rank);
        let mut read = part.slices().into_iter().map(|slice| {
            let mut out = vec![0.0; slice.here.len()];
            checkpoint.read(TensorKind::First, &slice.name, &slice.runs, &mut out)
        });
        // The tied token table, the first slice, is stored in the files of both stages.
        match rank {
            0 => assert!(read.skip(1).all(|read| read.is_ok()), "the first stage is intact"),
            _ => assert!(read.any(|read| read.is_err()), "the last stage is corrupt"),
        }
    }
    let whole = [Runs::one(0..8)];
    checkpoint.read(TensorKind::Param, "layers.0.norm1.gain", &whole, &mut [0.0; 8]).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}
