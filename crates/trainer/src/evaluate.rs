//! The loss on held-out data.

use lockstep_data::{Source, Split};
use lockstep_parallel::data;

use crate::rank::dtype;
use crate::{Error, Rank};

impl Rank<'_> {
    /// The mean over `batches` global batches of held-out samples: always the same ones, so that two
    /// evaluations can be compared.
    pub fn evaluate(&mut self, source: &Source, batches: usize) -> Result<f64, Error> {
        let plan = self.plan;
        let mut sums = [0.0, 0.0];
        for batch in 0..batches {
            for micro in 0..plan.train.accumulation {
                let first = self.group.rank() * plan.local_batch() + micro * plan.train.micro_batch;
                self.load(source, Split::HeldOut, batch as u64, first);
                let loss = self.model.evaluate(
                    &self.device,
                    &self.weights,
                    &self.batch,
                    dtype(plan),
                    &mut self.tape,
                );
                sums[0] += loss.sum;
                sums[1] += loss.tokens as f64;
            }
        }
        data::sum(self.group, &mut sums)?;
        Ok(sums[0] / sums[1])
    }
}
