//! Buffers of the micro-batches that a rank works on at the same time.

use std::time::{Duration, Instant};

use lockstep_data::{SampleId, Source, Split};
use lockstep_kernels::Device;
use lockstep_model::{Activations, Batch, Model, PendingLoss};
use lockstep_plan::Plan;

use crate::skipped_samples::SkippedSamples;

/// Buffers of the micro-batches in flight.
pub(crate) struct InFlight {
    /// As many as may be in flight at once.
    pub batches: Vec<Batch>,
    /// Tokens of a micro-batch on the host: (micro_batch, seq + 1).
    samples: Vec<u32>,
    /// Activations saved for backward: (chunks, micro-batches).
    pub activations: Vec<Option<Activations>>,
    /// Activations to reuse.
    pub spare: Vec<Activations>,
    /// Losses of the micro-batches of this step, each with its fraction of the tokens.
    pub losses: Vec<(PendingLoss, f64)>,
    /// Corrupt samples of this step.
    pub skipped: SkippedSamples,
    /// Time spent reading samples in this step.
    pub reading: Duration,
}

impl InFlight {
    pub fn new(plan: &Plan, device: &Device, rank: usize, model: &Model) -> InFlight {
        let (micro_batch, seq) = (plan.train.micro_batch, plan.data.seq);
        let micros = plan.train.accumulation;
        let in_flight = if plan.layout.pipe == 1 { 1 } else { micros };
        let batch = || Batch::of_runs(device, micro_batch, seq, plan.runs(rank));
        InFlight {
            batches: (0..in_flight).map(|_| batch()).collect(),
            samples: vec![0; micro_batch * (seq + 1)],
            activations: (0..micros * model.part.stages.len()).map(|_| None).collect(),
            spare: Vec::new(),
            losses: Vec::new(),
            skipped: SkippedSamples::default(),
            reading: Duration::ZERO,
        }
    }

    /// Buffer of a micro-batch.
    pub fn batch(&self, micro: usize) -> &Batch {
        &self.batches[micro % self.batches.len()]
    }

    /// Reads the samples of a micro-batch, from `first` on.
    pub fn load(
        &mut self,
        plan: &Plan,
        device: &Device,
        source: &Source,
        micro: usize,
        first: SampleId,
    ) {
        let InFlight { batches, samples, skipped, reading, .. } = self;
        let start = Instant::now();
        for (row, sample) in samples.chunks_exact_mut(plan.data.seq + 1).enumerate() {
            let id = SampleId { index: first.index + row, ..first };
            let damage = source.sample(id, sample);
            // Held-out samples are read in each evaluation and are not counted.
            if id.split == Split::Train && !damage.is_empty() {
                skipped.add(id.index, damage);
            }
        }
        *reading += start.elapsed();
        let count = batches.len();
        batches[micro % count].fill(device, samples);
    }

    /// Drops the activations of a pass that failed.
    pub fn drop_activations(&mut self) {
        self.activations.iter_mut().for_each(|activations| *activations = None);
    }
}
