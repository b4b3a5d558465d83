//! Loss on held-out data, and forward passes without gradients.

use lockstep_comm::trace::SpanKind;
use lockstep_data::{SampleId, Source, Split};
use lockstep_kernels::Tensor;
use lockstep_model::{Loss, StagePass};
use lockstep_parallel::sum;

use crate::from_plan::pass;
use crate::{Error, Rank, train_sample};

impl Rank<'_> {
    /// Mean loss over `batches` global batches of held-out samples, which are the same in each evaluation. Collective.
    pub fn evaluate(&mut self, source: &Source, batches: usize) -> Result<f64, Error> {
        let _span = self.group.tracer().span(SpanKind::Evaluation, "evaluation");
        self.settle();
        let mut sums = [0.0, 0.0];
        for batch in 0..batches {
            for micro in 0..self.plan.train.accumulation {
                let first = SampleId {
                    split: Split::HeldOut,
                    batch: batch as u64,
                    ..train_sample(self.plan, 1, self.first_sample(micro))
                };
                let losses = self.infer(source, first, micro, |_, _, _| {})?;
                if let Some(losses) = losses.filter(|_| self.groups.is_tensor_root()) {
                    let loss = Loss::read(&self.device, &losses);
                    sums[0] += loss.sum;
                    sums[1] += loss.tokens as f64;
                }
            }
        }
        self.groups.check()?;
        sum(self.group, &mut sums)?;
        Ok(sums[0] / sums[1])
    }

    /// Runs a micro-batch, whose first sample is `first`, forward through all stages. Returns the loss of each token on
    /// the last stage. Calls `on_output` with the output of each block of this rank.
    pub(crate) fn infer(
        &mut self,
        source: &Source,
        first: SampleId,
        micro: usize,
        mut on_output: impl FnMut(&lockstep_kernels::Device, usize, &Tensor),
    ) -> Result<Option<Tensor>, Error> {
        self.in_flight.load(self.plan, &self.device, source, micro, first);
        let mut pipeline = self.pipeline.take().expect("a rank has its pipeline between passes");
        let (model, device) = (&self.model, &self.device);
        let pass = &pass(self.plan, device, &self.groups, first.batch + 1, first.index);
        let batch = self.in_flight.batch(micro);
        let weights = &mut self.store.weights;
        let mut losses = None;
        let last = model.part.stages.len() - 1;
        let result = pipeline.forward(device, &self.groups, |chunk, input| {
            let mut on_block = |block: usize, x: &Tensor| on_output(device, block, x);
            let at = StagePass { stage: chunk, pass, batch, defer_weight_grads: false };
            let output = model.infer(&at, input, weights, &mut on_block);
            if chunk == last && model.part.has_head() {
                losses = Some(output.clone());
            }
            output
        });
        self.pipeline = Some(pipeline);
        result?;
        Ok(losses)
    }
}
