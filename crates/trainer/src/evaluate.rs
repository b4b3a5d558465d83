//! The loss on held-out data.

use lockstep_data::{Source, Split};
use lockstep_kernels::Tensor;
use lockstep_model::{Loss, StagePass};
use lockstep_parallel::sum;

use crate::rank::pass;
use crate::{Error, Rank};

impl Rank<'_> {
    /// The mean over `batches` global batches of held-out samples: always the same ones, so that two
    /// evaluations can be compared.
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

    /// A micro-batch's way through all stages, without gradients: the loss of each token, on the last stage.
    /// `look` sees the stream after each block of this rank.
    pub(crate) fn infer(
        &mut self,
        source: &Source,
        split: Split,
        step: u64,
        micro: usize,
        mut look: impl FnMut(&lockstep_kernels::Device, usize, &Tensor),
    ) -> Result<Option<Tensor>, Error> {
        let first = self.first_sample(micro);
        self.in_flight.load(self.plan, &self.device, source, split, step, micro, first);
        let mut pipeline = self.pipeline.take().expect("a rank has its pipeline between passes");
        let (model, device) = (&self.model, &self.device);
        let pass = &pass(self.plan, device, &self.groups, step, first);
        let batch = self.in_flight.batch(micro);
        let weights = &mut self.store.weights;
        let mut losses = None;
        let last = model.part.stages.len() - 1;
        let through = pipeline.forward(device, &self.groups, |chunk, input| {
            let mut seen = |block: usize, x: &Tensor| look(device, block, x);
            let at = StagePass { stage: chunk, pass, batch, defer_weight_grads: false };
            let output = model.infer(&at, input, weights, &mut seen);
            if chunk == last && model.part.has_head() {
                losses = Some(output.clone());
            }
            output
        });
        self.pipeline = Some(pipeline);
        through?;
        Ok(losses)
    }
}
