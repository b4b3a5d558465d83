//! Loss on held-out data, and forward passes without gradients.

use lockstep_data::{Source, Split};
use lockstep_kernels::Tensor;
use lockstep_model::{Loss, StagePass};
use lockstep_parallel::sum;

use crate::rank::{MicroBatchSamples, pass};
use crate::{Error, Rank};

impl Rank<'_> {
    /// Mean loss over `batches` global batches of held-out samples, which are the same in each evaluation. Collective.
    pub fn evaluate(&mut self, source: &Source, batches: usize) -> Result<f64, Error> {
        let mut sums = [0.0, 0.0];
        for batch in 0..batches {
            for micro in 0..self.plan.train.accumulation {
                let losses =
                    self.infer(source, Split::HeldOut, batch as u64, micro, |_, _, _| {})?;
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

    /// Runs a micro-batch forward through all stages. Returns the loss of each token on the last stage. Calls
    /// `on_output` with the output of each block of this rank.
    pub(crate) fn infer(
        &mut self,
        source: &Source,
        split: Split,
        step: u64,
        micro: usize,
        mut on_output: impl FnMut(&lockstep_kernels::Device, usize, &Tensor),
    ) -> Result<Option<Tensor>, Error> {
        let first = self.first_sample(micro);
        let samples = MicroBatchSamples { split, step, micro, first };
        self.in_flight.load(self.plan, &self.device, source, samples);
        let mut pipeline = self.pipeline.take().expect("a rank has its pipeline between passes");
        let (model, device) = (&self.model, &self.device);
        let pass = &pass(self.plan, device, &self.groups, step, first);
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
