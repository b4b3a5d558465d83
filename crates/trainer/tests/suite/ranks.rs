//! Data parallelism: any number of ranks computes the same training run.

use lockstep_comm::{World, on_threads};
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Error, Rank, StepResult};

use crate::plans::{masters, plan, source};

/// Results of ten steps and the final parameters of each rank.
fn trained(plan: &Plan, threads: usize) -> Vec<(Vec<StepResult>, Vec<f32>)> {
    let source = source();
    on_threads(plan.ranks, |world| {
        let mut rank = Rank::new(plan, &world, Device::from_env(threads)).unwrap();
        let steps = (1..=10).map(|step| rank.step(&source, step).unwrap()).collect();
        (steps, masters(&rank))
    })
}

fn losses(steps: &[StepResult]) -> Vec<f64> {
    steps.iter().map(|step| step.loss).collect()
}

#[test]
fn results_do_not_depend_on_the_number_of_ranks() {
    for sets in [
        vec![],
        vec!["model.preset=llama-test"],
        vec!["model.dropout=0.2"],
        vec!["layout.recompute=full", "train.micro_batch=1"],
    ] {
        let (one_rank, values) = trained(&plan(1, &sets), 1).remove(0);
        assert!(one_rank[9].loss < one_rank[0].loss, "{sets:?}: the loss does not fall");
        for ranks in [2, 3, 6] {
            let all = trained(&plan(ranks, &sets), 1);
            for (steps, theirs) in &all {
                assert_eq!(losses(steps), losses(&all[0].0), "{sets:?}: losses of ranks differ");
                assert!(theirs == &all[0].1, "{sets:?}: parameters of ranks differ");
            }
            for (one, many) in one_rank.iter().zip(&all[0].0) {
                let error = (one.loss / many.loss - 1.0).abs();
                assert!(error < 2e-5, "{sets:?} on {ranks}: {} against {}", many.loss, one.loss);
            }
            let difference =
                values.iter().zip(&all[0].1).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(difference < 1e-4, "{sets:?} on {ranks}: parameters differ by {difference}");
        }
    }
}

#[test]
fn results_are_bit_identical_for_any_number_of_threads() {
    for preset in ["model.preset=gpt2-test", "model.preset=moe-test"] {
        let plan = plan(1, &[preset]);
        let (first, values) = trained(&plan, 1).remove(0);
        for threads in [1, 3] {
            let (again, same) = trained(&plan, threads).remove(0);
            assert_eq!(losses(&first), losses(&again), "{preset} with {threads} threads");
            assert!(values == same, "{preset} with {threads} threads");
        }
    }
}

/// A rank whose peer has left gets an error, and can repeat the step in another group.
#[test]
fn a_step_after_a_failed_collective_discards_old_gradients() {
    let (plan, source) = (plan(1, &[]), source());
    let fresh = |world: &World| {
        let mut rank = Rank::new(&plan, world, Device::from_env(1)).unwrap();
        let stepped = rank.step(&source, 1).unwrap();
        (stepped.loss, stepped.grad_norm)
    };
    let repeat = |alone: &World, pair: World| {
        if pair.rank() == 1 {
            return None;
        }
        let mut rank = Rank::new(&plan, alone, Device::from_env(1)).unwrap();
        // The gradients are complete when the reduction of the loss fails because the other rank has left.
        rank.group = &pair;
        let failed = rank.step(&source, 1);
        assert!(matches!(failed, Err(Error::Comm(_))), "{failed:?}");
        rank.group = alone;
        let stepped = rank.step(&source, 1).unwrap();
        Some((stepped.loss, stepped.grad_norm))
    };
    on_threads(1, |alone| {
        let repeated = on_threads(2, |pair| repeat(&alone, pair));
        assert_eq!(repeated[0], Some(fresh(&alone)));
    });
}
