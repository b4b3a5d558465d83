//! Training with fp8 multiplies. A CPU emulates them.

use std::path::Path;

use lockstep_comm::on_threads;
use lockstep_kernels::{Device, Tag};
use lockstep_plan::{Ledger, Plan};
use lockstep_trainer::{Rank, Run, Start, run};

use crate::plans::{masters, plan, source};

/// A plan for a GPU, on which the tests run if there is one.
fn fp8_plan(ranks: usize, sets: &[&str]) -> Plan {
    let base = [
        "device.kind=cuda",
        "precision.compute=bf16",
        "model.dim=32",
        "model.heads=2",
        "model.ffn=64",
        "model.layers=2",
        "model.seq=16",
        "train.global_batch=4",
        "train.micro_batch=2",
        "train.lr=1e-2",
        "train.warmup=2",
    ];
    plan(ranks, &[&base[..], sets].concat())
}

/// Losses of the steps, and the parameters after them, on the first rank.
fn train(plan: &Plan, steps: u64) -> (Vec<f64>, Vec<f32>) {
    let source = source();
    let mut all = on_threads(plan.ranks, |world| {
        let mut rank = Rank::new(plan, &world, Device::from_env(1)).unwrap();
        let losses = (1..=steps).map(|step| rank.step(&source, step).unwrap().loss).collect();
        (losses, masters(&rank))
    });
    all.swap_remove(0)
}

fn mean_of_last(losses: &[f64]) -> f64 {
    let last = &losses[losses.len() - 5..];
    last.iter().sum::<f64>() / 5.0
}

#[test]
fn losses_are_those_of_bf16_within_a_percent() {
    for (family, scalings) in [("gpt2", &["delayed"][..]), ("llama", &["current"])] {
        let family = format!("model.preset={family}-test");
        let (plain, _) = train(&fp8_plan(1, &[&family]), 20);
        assert!(mean_of_last(&plain) < 0.9 * plain[0], "{plain:?}");
        for scaling in scalings {
            let more = &format!("precision.fp8_scaling={scaling}");
            let (losses, _) = train(&fp8_plan(1, &[&family, "precision.fp8=layers", more]), 20);
            assert_ne!(losses, plain);
            let (expected, got) = (mean_of_last(&plain), mean_of_last(&losses));
            assert!((got / expected - 1.0).abs() < 0.01, "{family} {more}: {got}, bf16 {expected}");
        }
    }
}

/// Recomputed inputs of linear layers are cast to the same codes as saved ones, and two replicas with ZeRO agree with
/// one up to the scales of their own micro-batches.
#[test]
fn recompute_gives_the_same_bits_and_replicas_the_same_losses() {
    let of = |ranks, more: &[&str]| {
        let sets = [&["precision.fp8=layers"][..], more].concat();
        train(&fp8_plan(ranks, &sets), 3)
    };
    let one = of(1, &[]);
    for recompute in ["selective", "full"] {
        assert_eq!(of(1, &[&format!("layout.recompute={recompute}")]), one, "{recompute}");
    }
    for zero in ["layout.zero=1", "layout.zero=3"] {
        let (losses, _) = of(2, &["layout.data=2", zero]);
        for (got, expected) in losses.iter().zip(&one.0) {
            assert!((got / expected - 1.0).abs() < 1e-3, "{zero}: {got}, expected {expected}");
        }
    }
}

/// The parameters after training in a folder, from its newest checkpoint if there is one.
fn run_in(folder: &Path, sets: &[&str]) -> Vec<f32> {
    let schedule = ["train.schedule=constant", "checkpoint.every=3"];
    let (plan, source) = (fp8_plan(1, &[&schedule[..], sets].concat()), source());
    std::fs::create_dir_all(folder).unwrap();
    let mut all = on_threads(1, |world| {
        let checkpoint = lockstep_ckpt::find(folder).ok();
        let start = checkpoint.map(|checkpoint| Start { checkpoint, resume: true });
        let (plan, source, stop) = (&plan, &source, &|| false);
        let (device, group, generation) = (Device::from_env(1), &world, None);
        let inputs = Run { plan, device, group, source, folder, start, generation, stop };
        masters(&run(&inputs, &mut |_| {}).unwrap().rank)
    });
    all.swap_remove(0)
}

/// With delayed scales too, because a run forgets them at each checkpoint.
#[test]
fn a_resumed_run_gives_the_same_bits() {
    let temporary = std::env::temp_dir().join(format!("lockstep-fp8-{}", std::process::id()));
    for scaling in ["current", "delayed"] {
        let scaling_set = format!("precision.fp8_scaling={scaling}");
        let sets = |steps| ["precision.fp8=layers", &scaling_set, steps];
        let (whole, halves) = (temporary.join(scaling), temporary.join(format!("{scaling}-2")));
        let uninterrupted = run_in(&whole, &sets("train.steps=5"));
        run_in(&halves, &sets("train.steps=3"));
        assert!(run_in(&halves, &sets("train.steps=5")) == uninterrupted, "{scaling}");
    }
    std::fs::remove_dir_all(&temporary).unwrap();
}

#[test]
fn memory_matches_the_ledger() {
    for family in ["gpt2", "llama"] {
        for recompute in ["none", "selective", "full"] {
            let sets = [
                format!("model.preset={family}-test"),
                format!("layout.recompute={recompute}"),
                "precision.fp8=layers".to_string(),
            ];
            let plan = fp8_plan(1, &sets.each_ref().map(|set| set.as_str()));
            let source = source();
            let memory = on_threads(1, |world| {
                let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
                rank.device.reset_peaks();
                (1..=2).for_each(|step| {
                    rank.step(&source, step).unwrap();
                });
                rank.device.memory()
            });
            let planned = Ledger::of(&plan, 0).activations;
            assert_eq!(memory[0].of(Tag::Activations).peak, planned, "{family} {recompute}");
        }
    }
}
