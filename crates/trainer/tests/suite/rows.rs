//! Sequence parallelism with overlap: gathering rows during the matrix multiply does not change any bit.

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_trainer::Rank;

use crate::cuts::plan;
use crate::plans::{masters, source};

/// Losses and gradient norms of three steps, and the parameters of each rank after them, as bits.
fn trained(words: &str) -> Vec<(Vec<u64>, Vec<u32>)> {
    let (plan, source) = (plan(words), source());
    on_threads(plan.ranks, |world| {
        let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
        let steps = (1..=3).map(|step| rank.step(&source, step).unwrap());
        let results =
            steps.flat_map(|step| [step.loss.to_bits(), step.grad_norm.to_bits()]).collect();
        (results, masters(&rank).iter().map(|number| number.to_bits()).collect())
    })
}

/// Whether losses and gradient norms agree to 1%, the rounding of bf16 in a small model.
fn nearly(a: &[(Vec<u64>, Vec<u32>)], b: &[(Vec<u64>, Vec<u32>)]) -> bool {
    let numbers = |results: &[(Vec<u64>, Vec<u32>)]| {
        results.iter().flat_map(|(steps, _)| steps.clone()).map(f64::from_bits).collect::<Vec<_>>()
    };
    numbers(a).iter().zip(numbers(b)).all(|(a, b)| (a / b - 1.0).abs() < 1e-2)
}

#[test]
fn overlapped_sequence_parallelism_is_bit_identical() {
    for words in [
        "gpt2 tensor=2 sequence=true",
        "gpt2 tensor=3 sequence=true model.dropout=0.1 train.micro_batch=2",
        "llama tensor=4 sequence=true precision.compute=bf16 train.micro_batch=3",
        "llama tensor=2 sequence=true recompute=selective",
        "gpt2 tensor=2 sequence=true recompute=full precision.compute=bf16",
        "moe tensor=2 sequence=true model.shared_experts=1",
        "llama tensor=2 sequence=true pipe=2 schedule=zb-h1",
        "gpt2 tensor=2 sequence=true data=2 zero=3 context=2 train.micro_batch=2",
    ] {
        let [blocking, overlapped] =
            ["false", "true"].map(|overlap| trained(&format!("{words} comm.overlap={overlap}")));
        // A GPU multiplies other numbers of rows with other algorithms.
        match std::env::var("LOCKSTEP_DEVICE").is_ok_and(|device| device == "cuda") {
            false => assert!(blocking == overlapped, "{words}"),
            true => assert!(nearly(&blocking, &overlapped), "{words}"),
        }
    }
}
