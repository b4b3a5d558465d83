//! Offloading is the same training: states, gradients and activations in host memory give the same bits.

use lockstep_comm::on_threads;
use lockstep_kernels::{Device, DeviceType, OutOfMemory};
use lockstep_plan::Plan;
use lockstep_trainer::{Rank, Snapshot};

use crate::cuts::plan;
use crate::plans::source;

const STEPS: u64 = 3;

/// Losses, gradient norms and held-out losses of each step, and the state after the last one, by rank.
fn trained(plan: &Plan) -> Vec<(Vec<[f64; 3]>, Vec<f32>)> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let mut rank = Rank::new(plan, &world, Device::from_env(1)).unwrap();
        let mut reports = Vec::new();
        for step in 1..=STEPS {
            let stepped = rank.step(&source, step).unwrap();
            // In between, updates are pending when the next step begins.
            let held_out = if step == 2 { rank.evaluate(&source, 1).unwrap() } else { 0.0 };
            reports.push([stepped.loss, stepped.grad_norm, held_out]);
        }
        rank.settle();
        let snapshot = rank.snapshot(Snapshot::default()).completed();
        (reports, snapshot.values().to_vec())
    })
}

#[test]
fn offloading_gives_the_same_bits() {
    for words in [
        "gpt2 precision.compute=bf16 train.clip=0.1",
        "llama model.tied=true train.micro_batch=12 train.clip=0.1",
        "moe precision.compute=bf16",
        "gpt2 data=2 zero=1 precision.compute=bf16",
        "llama data=2 zero=2 precision.gradients=bf16",
        "llama data=2 zero=3 comm.overlap=true",
        "gpt2 data=2 comm.overlap=true model.dropout=0.1",
        "llama pipe=2 tensor=2 sequence=true",
        "gpt2 pipe=2 chunks=2 recompute=selective",
    ] {
        let none = trained(&plan(words));
        for offload in ["optimizer", "optimizer+gradients", "activations", "all"] {
            let has_experts = words.starts_with("moe");
            if has_experts && ["activations", "all"].contains(&offload) {
                continue;
            }
            let moved = trained(&plan(&format!("{words} offload={offload}")));
            for (rank, (none, moved)) in none.iter().zip(&moved).enumerate() {
                let what = format!("{words} offload={offload}, rank {rank}");
                if Device::from_env(1).device_type() == DeviceType::Cpu {
                    assert!(none == moved, "{what}: {:?} {:?}", none.0, moved.0);
                }
                close(&none.0.concat(), &moved.0.concat(), 1e-6, &what);
                let wide =
                    |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                close(&wide(&none.1), &wide(&moved.1), 1e-6, &what);
            }
        }
    }
}

/// Asserts that the largest difference is at most `tolerance` of the largest value.
fn close(one: &[f64], other: &[f64], tolerance: f64, what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    let largest = one.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let apart = one.iter().zip(other).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
    assert!(apart <= tolerance * largest, "{what}: {apart:e} of {largest:e}");
}

#[test]
fn what_cannot_be_offloaded_is_an_error() {
    let refused = |words: &str| {
        let panic = std::panic::catch_unwind(|| plan(words)).expect_err(words);
        panic.downcast_ref::<String>().expect("a message").clone()
    };
    let error = refused("moe offload=activations");
    assert!(error.contains("does not support a mixture of experts"), "{error}");
    let error = refused("gpt2 pipe=2 schedule=zb-h1 offload=all");
    assert!(error.contains("deferred weight gradients"), "{error}");
    let error = refused("gpt2 offload=disk");
    assert!(error.contains("optimizer+gradients"), "{error}");
}

/// The error of a tensor that does not fit names what holds the memory.
#[test]
fn out_of_memory_is_an_error_with_tags() {
    let device = Device::from_env(1);
    device.set_memory_limit(200 << 20);
    let keep =
        device.zeros(1, 25 << 20, lockstep_kernels::Dtype::F32, lockstep_kernels::Tag::Optimizer);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        device.empty(1, 50 << 20, lockstep_kernels::Dtype::F32, lockstep_kernels::Tag::Gradients)
    }));
    let panic = panic.map(drop).unwrap_err();
    let error = panic.downcast_ref::<OutOfMemory>().expect("its own type").to_string();
    assert!(error.starts_with("out of memory: 200 MiB for gradients"), "{error}");
    assert!(error.contains("optimizer 100 MiB"), "{error}");
    drop(keep);
}
