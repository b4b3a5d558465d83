//! A checkpoint of any layout is read on any other: the same state to the bit, and the samples go on where they were.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{Disk, Position, Runs, TensorKind};
use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Rank, Run, SaveOutcome, Saver, Snapshot, Start, build};

use crate::cuts;
use crate::plans::source;

const STEPS: u64 = 2;

/// Every axis, ZeRO's stages, splits of the pipeline, degrees of experts: each has ten others.
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

/// The token table is tied: the first and the last stage have it both.
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

/// What the ranks have written, put together: each element once, and what they owe added up.
pub fn together(snapshots: &[Snapshot]) -> State {
    let mut state = State::new();
    for Snapshot { pieces, values } in snapshots {
        let mut rest = &values[..];
        for piece in pieces {
            let (mine, later) = rest.split_at(piece.len());
            rest = later;
            let owed = piece.kind.is_per_rank();
            let start = if owed { 0.0 } else { f32::NAN };
            let tensor = state
                .entry((piece.kind, piece.named.name.clone()))
                .or_insert_with(|| vec![start; piece.named.len()]);
            if !piece.counts {
                continue;
            }
            let elements = piece.runs.iter().flat_map(|runs| runs.ranges()).flatten();
            for (element, value) in elements.zip(mine) {
                assert!(owed || tensor[element].is_nan(), "{} twice", piece.named.name);
                tensor[element] = if owed { tensor[element] + value } else { *value };
            }
        }
    }
    assert!(state.values().flatten().all(|value| !value.is_nan()), "every element is there");
    state
}

pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Trains a few steps and saves: what each rank has written.
fn trained(plan: &Plan, folder: &Path) -> Vec<Snapshot> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let mut rank = Rank::new(plan, &world, Device::cpu(1)).unwrap();
        for step in 1..=STEPS {
            rank.step(&source, step).unwrap();
        }
        let mut saver = Saver::new(plan, &world, folder, 0, Disk::default());
        let samples = STEPS * plan.train.global_batch as u64;
        let position = Position { samples, seed: plan.train.seed, data: source.identity() };
        assert!(saver.begin(&rank, STEPS, position).unwrap().is_none());
        let ended = saver.finish().unwrap();
        assert!(matches!(ended, Some(SaveOutcome::Saved(_))), "{ended:?}");
        rank.snapshot(Snapshot::default())
    })
}

/// Starts from what is there: what each rank has.
fn loaded(plan: &Plan, folder: &Path) -> Vec<Snapshot> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let start = Some(Start { checkpoint: folder.to_path_buf(), resume: true });
        let (source, stop) = (&source, &|| false);
        let device = Device::cpu(plan.train.threads);
        let run =
            Run { plan, device, group: &world, source, folder, start, generation: None, stop };
        let (rank, done) = build(&run, &mut |_| {}).unwrap();
        assert_eq!(done, STEPS);
        rank.snapshot(Snapshot::default())
    })
}

/// Numbers of the samples that the replicas of a layout work on in a step, in order.
fn sample_ids(plan: &Plan, step: u64) -> Vec<u64> {
    let mut ids = Vec::new();
    for data in 0..plan.layout.data {
        for micro in 0..plan.train.accumulation {
            let first = plan.first_sample(data, micro);
            let batch = plan.train.global_batch as u64;
            ids.extend((first..first + plan.train.micro_batch).map(|at| step * batch + at as u64));
        }
    }
    ids.sort_unstable();
    ids
}

fn every_layout_reads_every_other(layouts: &[&str], name: &str) {
    for (number, from) in layouts.iter().enumerate() {
        let (plan, folder) = (cuts::plan(from), folder(&format!("reshard-{name}-{number}")));
        let before = together(&trained(&plan, &folder));
        assert_eq!(before.len(), 3 * lockstep_ckpt::params_of(&plan.model).len(), "{from}");
        let checkpoint = lockstep_ckpt::load(&lockstep_ckpt::find(&folder).unwrap()).unwrap();
        let used = checkpoint.head().position.samples;
        for to in layouts {
            let plan = cuts::plan(to);
            let after = together(&loaded(&plan, &folder));
            for (key, before) in &before {
                let same = before.iter().zip(&after[key]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && before.len() == after[key].len(), "{from} to {to}: {key:?}");
            }
            // Samples are counted from the first step's, whose number is 1.
            let batch = plan.train.global_batch as u64;
            let next: Vec<u64> = (used + batch..used + 2 * batch).collect();
            assert_eq!(sample_ids(&plan, STEPS + 1), next, "{from} to {to}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn every_layout_of_experts_reads_every_other() {
    every_layout_reads_every_other(&EXPERTS, "experts");
}

#[test]
fn every_layout_of_a_tied_model_reads_every_other() {
    every_layout_reads_every_other(&TIED, "tied");
}

/// What was not sent of the gradients comes back to the bit on the same layout; on another one its sum does.
#[test]
fn what_is_owed_reshards() {
    let layouts = [
        "llama data=4 comm.compression=int8",
        "llama data=2 zero=2 comm.compression=int8",
        "llama data=3 comm.compression=topk:0.01 comm.compression_warmup=0 comm.bucket_mb=0.05",
        "llama data=2 tensor=2 sequence=true comm.compression=bf16",
        "llama data=2 tensor=4 zero=1 pipe=2 comm.compression=bf16",
    ];
    for (number, from) in layouts.iter().enumerate() {
        let (plan, folder) = (cuts::plan(from), folder(&format!("reshard-owed-{number}")));
        let written = trained(&plan, &folder);
        let before = together(&written);
        let owed = |state: &State| -> State {
            state
                .iter()
                .filter(|((kind, _), _)| *kind == TensorKind::Residual)
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect()
        };
        assert!(
            owed(&before).values().flatten().any(|value| *value != 0.0),
            "{from}: some is owed"
        );
        let again = loaded(&plan, &folder);
        for (rank, (one, other)) in written.iter().zip(&again).enumerate() {
            assert!(
                one.pieces == other.pieces && one.values == other.values,
                "{from}: rank {rank}"
            );
        }
        for to in layouts.iter().filter(|to| *to != from) {
            let after = together(&loaded(&cuts::plan(to), &folder));
            assert_eq!(owed(&before), owed(&after), "{from} to {to}");
        }
        // Nobody can owe anything alone; the rest of the state is there.
        let alone = together(&loaded(&cuts::plan("llama"), &folder));
        assert!(owed(&alone).is_empty() && alone.iter().all(|(key, value)| &before[key] == value));
        std::fs::remove_dir_all(folder).unwrap();
    }
}

/// A rank that needs little reads little: what it does not need may be damaged.
#[test]
fn a_rank_reads_only_what_it_needs() {
    let (plan, folder) = (cuts::plan("gpt2 pipe=2"), folder("reshard-little"));
    trained(&plan, &folder);
    let dir = lockstep_ckpt::find(&folder).unwrap();
    // The last stage's file.
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
        // Tied, the token table is spread over the files of both.
        let stage = if rank == 0 { read.by_ref().skip(1).all(|read| read.is_ok()) } else { true };
        assert!(stage, "the first stage is whole");
        if rank == 1 {
            assert!(read.any(|read| read.is_err()), "the last is not");
        }
    }
    let whole = [Runs::one(0..8)];
    checkpoint.read(TensorKind::Param, "layers.0.norm1.gain", &whole, &mut [0.0; 8]).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}
