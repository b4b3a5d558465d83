//! One rank's share of a run, and one optimizer step of it.

use std::time::{Duration, Instant};

use lockstep_comm::Group;
use lockstep_data::{Source, Split};
use lockstep_kernels::{AdamW, Device, Dtype};
use lockstep_model::{Batch, Dropout, Gradients, Loss, Model, Pass, Recompute, Tape, Weights};
use lockstep_parallel::data;
use lockstep_plan::{Compute, Plan};

use crate::{Error, Optimizer};

/// What one rank holds: its device, the model with its parameters and moments, and room for a micro-batch.
pub struct Rank<'a> {
    pub plan: &'a Plan,
    /// The data axis.
    pub group: &'a Group,
    pub device: Device,
    pub model: Model,
    pub weights: Weights,
    pub optimizer: Optimizer,
    pub(crate) gradients: Gradients,
    pub(crate) tape: Tape,
    pub(crate) batch: Batch,
    /// A micro-batch's tokens on the host: (micro_batch, seq + 1).
    samples: Vec<u32>,
}

/// What a step did: the same on every rank, but for the times.
#[derive(Clone, Copy, Debug)]
pub struct Stepped {
    /// Cross-entropy, mean over the tokens of the global batch.
    pub loss: f64,
    /// Routers' losses, as they enter the objective.
    pub auxiliary: f64,
    /// Of the whole gradient, before clipping.
    pub grad_norm: f64,
    pub lr: f64,
    pub time: Duration,
    /// What of it was spent in exchanges that nothing hid.
    pub exchange: Duration,
}

impl<'a> Rank<'a> {
    /// With random parameters, alike on all ranks.
    pub fn new(plan: &'a Plan, group: &'a Group, device: Device) -> Rank<'a> {
        let weights = Weights::init(&device, &plan.model, dtype(plan), plan.train.seed);
        Rank::with_weights(plan, group, device, weights)
    }

    /// With parameters from elsewhere, and fresh moments.
    pub fn with_weights(
        plan: &'a Plan,
        group: &'a Group,
        device: Device,
        weights: Weights,
    ) -> Rank<'a> {
        let model = Model::new(&plan.model);
        let (micro_batch, seq) = (plan.train.micro_batch, plan.data.seq);
        Rank {
            optimizer: Optimizer::new(&device, &weights.layout),
            gradients: Gradients::new(model.blocks()),
            tape: Tape::default(),
            batch: Batch::empty(&device, micro_batch, seq),
            samples: vec![0; micro_batch * (seq + 1)],
            plan,
            group,
            device,
            model,
            weights,
        }
    }

    /// Step `step` (the first is 1) on its global batch. On an error nothing has changed.
    pub fn step(&mut self, source: &Source, step: u64) -> Result<Stepped, Error> {
        let start = Instant::now();
        // What a step that could not reach its peers left behind is not to be added to.
        self.gradients.clear();
        let loss = self.passes(source, step);

        let exchange_start = Instant::now();
        data::sum_gradients(self.group, self.gradients.iter_mut().map(|(_, gradient)| gradient))?;
        let mut sums = [loss.sum, loss.auxiliary];
        data::sum(self.group, &mut sums)?;
        let exchange = exchange_start.elapsed();

        let squares: f64 =
            self.gradients.iter().map(|(_, g)| self.device.sum_of_squares(g.view())).sum();
        let grad_norm = squares.sqrt();
        let loss = sums[0] / self.plan.tokens_per_step() as f64;
        if !grad_norm.is_finite() || !loss.is_finite() {
            return Err(self.find_nan(source, step));
        }

        let lr = self.plan.lr(step as usize);
        let train = &self.plan.train;
        let scale =
            train.clip.map_or(1.0, |clip| if grad_norm > clip { clip / grad_norm } else { 1.0 });
        let numbers = AdamW {
            lr,
            beta1: train.betas[0],
            beta2: train.betas[1],
            eps: train.eps,
            weight_decay: train.weight_decay,
            step,
            scale,
        };
        self.optimizer.step(&self.device, &numbers, &mut self.weights, &self.gradients);
        self.gradients.clear();
        Ok(Stepped { loss, auxiliary: sums[1], grad_norm, lr, time: start.elapsed(), exchange })
    }

    /// Forward and backward of this rank's micro-batches: their loss, and their gradients summed.
    pub(crate) fn passes(&mut self, source: &Source, step: u64) -> Loss {
        let mut total = Loss::default();
        for micro in 0..self.plan.train.accumulation {
            let first =
                self.group.rank() * self.plan.local_batch() + micro * self.plan.train.micro_batch;
            self.load(source, Split::Train, step, first);
            let pass = self.pass(step, first);
            let loss = self.model.train(
                &self.device,
                &self.weights,
                &self.batch,
                &pass,
                &mut self.gradients,
                &mut self.tape,
            );
            // A micro-batch's auxiliary loss counts by its share of the tokens.
            let share = loss.tokens as f64 / pass.global_tokens as f64;
            total.sum += loss.sum;
            total.tokens += loss.tokens;
            total.auxiliary += loss.auxiliary * share;
        }
        total
    }

    /// Fills the batch with samples `first..` of a step's global batch.
    pub(crate) fn load(&mut self, source: &Source, split: Split, step: u64, first: usize) {
        let plan = self.plan;
        for (row, sample) in self.samples.chunks_exact_mut(plan.data.seq + 1).enumerate() {
            source.sample(
                split,
                plan.train.seed,
                step,
                plan.train.global_batch,
                first + row,
                sample,
            );
        }
        self.batch.fill(&self.device, &self.samples);
    }

    fn pass(&self, step: u64, first_sample: usize) -> Pass {
        let plan = self.plan;
        Pass {
            dtype: dtype(plan),
            recompute: match plan.layout.recompute {
                lockstep_plan::Recompute::None => Recompute::None,
                lockstep_plan::Recompute::Selective => Recompute::Selective,
                lockstep_plan::Recompute::Full => Recompute::Full,
            },
            dropout: (plan.model.dropout > 0.0).then(|| Dropout {
                probability: plan.model.dropout as f32,
                seed: plan.train.seed,
                step,
                first_token: (first_sample * plan.data.seq) as u64,
            }),
            global_tokens: plan.tokens_per_step(),
        }
    }
}

/// What a plan computes with.
pub fn dtype(plan: &Plan) -> Dtype {
    match plan.precision.compute {
        Compute::F32 => Dtype::F32,
        Compute::Bf16 => Dtype::Bf16,
    }
}
