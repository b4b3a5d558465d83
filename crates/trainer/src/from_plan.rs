//! Values that follow from the plan: arguments of passes, types, samples, and where parameters are stored.

use lockstep_comm::DeviceOptions;
use lockstep_data::{SampleId, Split};
use lockstep_kernels::{Device, Dtype, Fp8History};
use lockstep_model::{Dropout, Fp8, Groups, Model, Offloading, Pass};
use lockstep_parallel::Storage;
use lockstep_plan::reduction::ReductionPolicy;
use lockstep_plan::{Fp8Scaling, Plan, Precision};

/// The sample at `index` of a step's global batch. Steps count from 1, samples from 0.
pub fn train_sample(plan: &Plan, step: u64, index: usize) -> SampleId {
    assert!(step > 0, "the first step is 1");
    SampleId {
        split: Split::Train,
        seed: plan.train.seed,
        batch: step - 1,
        global_batch: plan.train.global_batch,
        index,
    }
}

/// Index in the global batch of the first sample of a micro-batch.
pub(crate) fn first_sample(plan: &Plan, groups: &Groups, micro: usize) -> usize {
    plan.first_sample(groups.coord.data, micro)
}

/// A pass of a micro-batch that neither counts expert loads nor offloads.
pub(crate) fn pass<'p>(
    plan: &Plan,
    device: &'p Device,
    groups: &'p Groups,
    step: u64,
    first_sample: usize,
) -> Pass<'p> {
    Pass {
        device,
        groups,
        dtype: dtype(plan),
        recompute: plan.layout.recompute,
        dropout: (plan.model.dropout > 0.0).then_some(Dropout {
            probability: plan.model.dropout as f32,
            seed: plan.train.seed,
            step,
            first_sample: first_sample as u64,
            seq: plan.data.seq as u64,
        }),
        global_tokens: plan.tokens_per_step(),
        loads: None,
        offload: Offloading::default(),
        fp8: plan.precision.fp8.is_on().then_some(Fp8 {
            head: plan.precision.fp8 == lockstep_plan::Fp8::LayersAndHead,
            history: None,
        }),
    }
}

/// The plan's options for collectives on device memory.
pub fn device_options(plan: &Plan) -> DeviceOptions {
    DeviceOptions { engine: plan.comm.device_engine, register: plan.comm.register_buffers }
}

/// Where a plan's parameters are stored.
pub(crate) fn storage(plan: &Plan) -> Storage {
    let gather = ReductionPolicy::of(plan).gather;
    Storage { dtype: dtype(plan), gather, offload: plan.layout.offload.optimizer() }
}

/// Delayed scales of fp8 matrices, if the plan uses them.
pub(crate) fn fp8_history(plan: &Plan, device: &Device, model: &Model) -> Option<Fp8History> {
    let Precision { fp8, fp8_scaling, .. } = plan.precision;
    let delayed = fp8.is_on() && fp8_scaling == Fp8Scaling::Delayed;
    let matrices = Fp8::most_matrices(model.part.total_blocks);
    delayed.then(|| Fp8History::new(device, matrices))
}

/// Dtype of a plan's activations.
pub fn dtype(plan: &Plan) -> Dtype {
    plan.precision.compute
}
