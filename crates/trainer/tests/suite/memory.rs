//! Memory as measured is memory as planned.

use lockstep_comm::on_threads;
use lockstep_kernels::{Device, Tag};
use lockstep_plan::Ledger;
use lockstep_trainer::Rank;

use crate::plans::{plan, source};

#[test]
fn states_are_planned_to_the_byte_and_activations_nearly() {
    for preset in ["gpt2-test", "llama-test", "moe-test"] {
        for compute in ["f32", "bf16"] {
            for recompute in ["none", "selective", "full"] {
                let sets = [
                    format!("model.preset={preset}"),
                    format!("precision.compute={compute}"),
                    format!("layout.recompute={recompute}"),
                ];
                let plan = plan(1, &sets.each_ref().map(String::as_str));
                let source = source();
                let memory = on_threads(1, |world| {
                    let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
                    (1..=2).for_each(|step| {
                        rank.step(&source, step).unwrap();
                    });
                    rank.device.memory()
                })[0];
                let planned = Ledger::of(
                    &plan.model,
                    plan.precision.compute,
                    plan.layout.recompute,
                    plan.train.micro_batch,
                    plan.data.seq,
                );
                let what = sets.join(" ");
                assert_eq!(memory.of(Tag::Parameters).peak, planned.parameters, "{what}");
                assert_eq!(memory.of(Tag::Gradients).peak, planned.gradients, "{what}");
                assert_eq!(memory.of(Tag::Optimizer).peak, planned.optimizer, "{what}");
                let activations = memory.of(Tag::Activations).peak;
                let error = (activations as f64 / planned.activations as f64 - 1.0).abs();
                assert!(error < 0.03, "{what}: {activations} against {}", planned.activations);
            }
        }
    }
}
