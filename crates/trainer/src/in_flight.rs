//! Buffers of the micro-batches that a rank works on at the same time.

use std::time::{Duration, Instant};

use lockstep_data::{SampleId, Source, Split};
use lockstep_kernels::{Device, DeviceType};
use lockstep_model::{Activations, Batch, Model, PendingLoss};
use lockstep_plan::Plan;

use crate::skipped_samples::SkippedSamples;

/// Buffers of the micro-batches in flight.
pub(crate) struct InFlight {
    /// As many as may be in flight at once, and one more if samples are read ahead.
    pub batches: Vec<Batch>,
    /// By micro-batch, its buffer.
    pub slots: Vec<usize>,
    /// The buffer filled last.
    newest: usize,
    /// Whether the first samples of the next step are read and copied before the host waits for this step.
    pub read_ahead: bool,
    /// Samples that were read ahead into the newest buffer.
    ahead: Option<Ahead>,
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

/// Samples in a buffer before the step that uses them.
struct Ahead {
    /// Number of the source.
    source: u64,
    first: SampleId,
    skipped: SkippedSamples,
}

impl InFlight {
    pub fn new(plan: &Plan, device: &Device, rank: usize, model: &Model) -> InFlight {
        let (micro_batch, seq) = (plan.train.micro_batch, plan.data.seq);
        let micros = plan.train.accumulation;
        let in_flight = if plan.layout.pipe == 1 { 1 } else { micros };
        let read_ahead = device.device_type() == DeviceType::Cuda;
        let batch = || Batch::of_runs(device, micro_batch, seq, plan.runs(rank));
        InFlight {
            batches: (0..in_flight + usize::from(read_ahead)).map(|_| batch()).collect(),
            slots: vec![0; micros],
            newest: 0,
            read_ahead,
            ahead: None,
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
        &self.batches[self.slots[micro]]
    }

    /// Reads the samples of a micro-batch, from `first` on, unless they were read ahead.
    pub fn load(
        &mut self,
        plan: &Plan,
        device: &Device,
        source: &Source,
        micro: usize,
        first: SampleId,
    ) {
        let wanted = (source.number(), first);
        match self.ahead.take().filter(|ahead| (ahead.source, ahead.first) == wanted) {
            Some(ahead) => self.skipped.append(ahead.skipped),
            None => {
                let skipped = self.read(plan, device, source, first);
                // Held-out samples are read in each evaluation and are not counted.
                if first.split == Split::Train {
                    self.skipped.append(skipped);
                }
            }
        }
        self.slots[micro] = self.newest;
        self.batches[self.newest].ready(device);
    }

    /// Reads samples into the next buffer and copies them next to the operations of the device.
    pub fn load_ahead(&mut self, plan: &Plan, device: &Device, source: &Source, first: SampleId) {
        let skipped = self.read(plan, device, source, first);
        self.ahead = Some(Ahead { source: source.number(), first, skipped });
    }

    fn read(
        &mut self,
        plan: &Plan,
        device: &Device,
        source: &Source,
        first: SampleId,
    ) -> SkippedSamples {
        let start = Instant::now();
        let mut skipped = SkippedSamples::default();
        for (row, sample) in self.samples.chunks_exact_mut(plan.data.seq + 1).enumerate() {
            let id = SampleId { index: first.index + row, ..first };
            let damage = source.sample(id, sample);
            if !damage.is_empty() {
                skipped.add(id.index, damage);
            }
        }
        self.newest = (self.newest + 1) % self.batches.len();
        self.batches[self.newest].fill_ahead(device, &self.samples);
        self.reading += start.elapsed();
        skipped
    }

    /// Drops the activations of a pass that failed.
    pub fn drop_activations(&mut self) {
        self.activations.iter_mut().for_each(|activations| *activations = None);
    }
}
