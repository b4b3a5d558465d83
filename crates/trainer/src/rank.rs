//! State of one rank, and its optimizer step.

use std::ops::Range;
use std::time::{Duration, Instant};

use lockstep_ckpt::{Checkpoint, ExtraState};
use lockstep_comm::trace::{CommAxis, SpanDetail, SpanKind};
use lockstep_comm::{Group, SharedHeap};
use lockstep_data::Source;
use lockstep_kernels::{AdamW, Device, DeviceType, Fp8History, Scalar};
use lockstep_model::{
    Activations, ExpertLoads, Fp8, Groups, Loss, Model, Offloading, Pass, PendingUpdates,
    StagePass, Store, Weights,
};
use lockstep_parallel::{
    ExposedTimes, HostGradients, MessageShape, Pipeline, SharedHostGradients, StoreOptions, Waited,
    sum,
};
use lockstep_plan::reduction::{Gather, RankReductions};
use lockstep_plan::schedule::{Act, Action};
use lockstep_plan::{Compression, Plan};

use crate::from_plan::{
    device_options, dtype, first_sample, fp8_history, pass, storage, train_sample,
};
use crate::in_flight::InFlight;
use crate::optimizer::LazyUpdates;
use crate::snapshot::load_weights;
use crate::{Error, ExpertLoad, Optimizer};

/// State of one rank: its device, its shard of the model and optimizer, and buffers for micro-batches.
pub struct Rank<'a> {
    pub plan: &'a Plan,
    /// All ranks.
    pub group: &'a Group,
    pub groups: Groups,
    pub device: Device,
    pub model: Model,
    pub store: Store,
    pub optimizer: Optimizer,
    pub(crate) pipeline: Option<Pipeline>,
    pub(crate) in_flight: InFlight,
    /// Additional state saved in checkpoints; the same on all ranks.
    pub extra: ExtraState,
    /// Ranges of the reduced gradients that this rank adds to the norm: block, unit, range.
    norm_ranges: Vec<(usize, usize, Range<usize>)>,
    /// Loads of the experts in the current step.
    pub(crate) loads: Option<ExpertLoads>,
    fp8_history: Option<Fp8History>,
    /// Numbers that the ranks sum in each step: `SCALARS`, then the loads of experts.
    pub(crate) sums: Vec<f64>,
    /// A step has been taken, so all memory is allocated.
    warm: bool,
    /// When the last step's results were read from a GPU, and when the step returned.
    last_step: Option<(Instant, Instant)>,
    /// The gather of a GPU's parameters after the last step.
    gathering: Option<Waited>,
}

/// Result of a step; the same on all ranks except for times and bytes.
#[derive(Clone, Copy, Debug)]
pub struct StepResult {
    /// Mean cross-entropy over the tokens of the global batch.
    pub loss: f64,
    /// Auxiliary losses of the routers, weighted as in the objective.
    pub auxiliary: f64,
    /// Loads of the experts, if the model has any.
    pub experts: Option<ExpertLoad>,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
    pub lr: f64,
    pub time: Duration,
    /// Exposed communication: time spent in collectives that was not overlapped with compute.
    pub exposed_comm: Duration,
    /// The same by axis.
    pub exposed_by_axis: ExposedTimes,
    /// Time spent reading samples.
    pub reading: Duration,
    /// Bytes sent by this rank.
    pub sent: u64,
}

impl<'a> Rank<'a> {
    /// Loss, auxiliary loss, squares of the gradient, and three counts of corrupt samples.
    pub(crate) const SCALARS: usize = 6;

    /// A rank with random parameters, which do not depend on the layout. Collective.
    pub fn new(plan: &'a Plan, group: &'a Group, device: Device) -> Result<Rank<'a>, Error> {
        let part = plan.part(group.rank());
        let weights = Weights::init(&device, &part, storage(plan), plan.train.seed);
        Rank::with_weights(plan, group, device, weights)
    }

    /// A rank with the given parameters and zero moments. Collective.
    pub fn with_weights(
        plan: &'a Plan,
        group: &'a Group,
        device: Device,
        weights: Weights,
    ) -> Result<Rank<'a>, Error> {
        let groups = Groups::new(group, &plan.mesh(), plan.layout.sequence)?
            .with_context(plan.layout.context_kind, plan.data.seq)?
            .with_overlap(plan.comm.overlap.tensor)
            .on_device(&device, device_options(plan))?;
        let model = Model::new(&plan.model, &plan.part(group.rank()));
        let options = StoreOptions {
            reductions: RankReductions::of(plan, &model.part),
            gradients: plan.precision.gradients,
            compression: plan.comm.compression,
        };
        let in_backward = options.reductions.offload_in_backward;
        let mut store = Store::new(&device, &groups, &model.part, weights, options);
        let norm_ranges = norm_ranges(&model);
        let optimizer = match plan.layout.offload.optimizer() {
            false => Optimizer::new(&device, &model.part),
            true => {
                let dtype = plan.precision.gradients;
                let gradients =
                    HostGradients::new(&device, &model.part, dtype, &norm_ranges, in_backward);
                let gradients = SharedHostGradients::new(gradients.into());
                store.host_gradients = Some(gradients.clone());
                Optimizer::offloaded(&device, &model.part, gradients, plan.train.threads)
            }
        };
        let in_flight = InFlight::new(plan, &device, group.rank(), &model);
        let rows = groups.stream_rows(in_flight.batches[0].tokens()).len();
        let message = MessageShape { rows, cols: plan.model.dim, dtype: dtype(plan) };
        let rank = Rank {
            optimizer,
            pipeline: Some(Pipeline::new(plan.schedule(), &groups, message)),
            norm_ranges,
            extra: ExtraState::default(),
            loads: ExpertLoads::new(&device, &plan.model),
            fp8_history: fp8_history(plan, &device, &model),
            sums: vec![0.0; Rank::SCALARS + plan.model.load_sums()],
            warm: false,
            last_step: None,
            gathering: None,
            plan,
            group,
            groups,
            device,
            model,
            store,
            in_flight,
        };
        if let Some(what) = rank.find_different_replicas()? {
            return Err(Error::Invalid(format!(
                "{what} before the first step; use the same run file, seed and checkpoint on all ranks"
            )));
        }
        Ok(rank)
    }

    /// A rank with the state of a checkpoint. Collective.
    pub fn resume(
        plan: &'a Plan,
        group: &'a Group,
        device: Device,
        checkpoint: &Checkpoint,
    ) -> Result<Rank<'a>, Error> {
        let part = plan.part(group.rank());
        let weights = load_weights(&device, &part, storage(plan), &checkpoint.params())?;
        let mut rank = Rank::with_weights(plan, group, device, weights)?;
        rank.load_states(checkpoint)?;
        Ok(rank)
    }

    /// Takes step `step` (the first is 1) on its global batch. An error leaves the state unchanged. Collective.
    pub fn step(&mut self, source: &Source, step: u64) -> Result<StepResult, Error> {
        let tracer = self.group.tracer();
        let _span = tracer.span_with(SpanKind::Step, "step", || SpanDetail::Step(step));
        let start = Instant::now();
        // A failed step leaves gradients behind.
        self.store.clear();
        if let Some(host) = &self.store.host_gradients {
            host.lock().expect("no thread panics while it holds the gradients").begin();
        }
        self.in_flight.skipped.clear();
        self.in_flight.reading = Duration::ZERO;
        self.store.reduction.begin(self.plan.compression(step as usize) == Compression::None);
        self.groups.forget_exposed();
        let sent_before = self.sent();
        self.passes(source, step)?;
        // The passes have used, and so updated, every block.
        self.settle();

        self.store.finish(&self.device, &self.groups)?;
        let [count, checksum, counted_checksum] = self.skipped_sums();
        let squares = self.squares();
        self.read_ahead(source, step + 1);
        // The only wait of the step.
        let (loss, squares) = (
            self.take_loss(),
            squares.map_or_else(|| self.host_squares(), |squares| squares.get()),
        );
        let waited = Instant::now();
        let scalars = [loss.sum, loss.auxiliary, squares, count, checksum, counted_checksum];
        self.sums[..Rank::SCALARS].copy_from_slice(&scalars);
        self.write_loads(loss.dropped);
        let reduction = Instant::now();
        sum(self.group, &mut self.sums)?;
        let summing = reduction.elapsed();
        tracer.measured(SpanKind::Exposed, CommAxis::Data.name(), reduction, summing);
        let scalars = self.sums.first_chunk::<{ Rank::SCALARS }>().expect("the scalars come first");
        let [loss, auxiliary, squares, skipped @ ..] = *scalars;
        let experts = self.expert_load();
        let auxiliary = auxiliary + experts.map_or(0.0, |experts| experts.balance_loss);
        self.count_skipped(step, skipped)?;
        let grad_norm = squares.sqrt();
        let loss = loss / self.plan.tokens_per_step() as f64;
        if !grad_norm.is_finite() || !loss.is_finite() {
            self.forget_scales();
            return Err(self.find_nan(source, step));
        }

        self.keep_slots();
        let lr = self.plan.lr(step as usize);
        let train = &self.plan.train;
        let scale =
            train.clip.map_or(1.0, |clip| if grad_norm > clip { clip / grad_norm } else { 1.0 });
        let numbers = AdamW {
            lr,
            beta1: self.plan.beta1(step as usize),
            beta2: train.betas[1],
            eps: train.eps,
            weight_decay: train.weight_decay,
            step,
            scale,
        };
        let optimizer_span = tracer.span(SpanKind::Optimizer, "optimizer");
        self.optimizer.step(&self.device, &numbers, &mut self.store);
        if let Some(history) = &self.fp8_history {
            history.advance(&self.device);
        }
        let reductions = self.store.reduction.policy();
        if reductions.gather == Gather::AfterOptimizer || reductions.prefetches() {
            // Parameters are gathered before the passes, or blocks ahead of them.
            self.settle();
        }
        drop(optimizer_span);
        self.store.clear();
        let (gathered, gathering) = self
            .groups
            .measured(CommAxis::Data, || self.store.weights.all_gather(&self.device, &self.groups));
        gathered?;
        let exposed = self.exposed(summing, gathering);
        let sent = self.sent() - sent_before;
        let (time, reading) = (self.step_time(start, waited), self.in_flight.reading);
        if !std::mem::replace(&mut self.warm, true) {
            SharedHeap::use_huge_pages();
            self.groups.connect_messages()?;
        }
        Ok(StepResult {
            loss,
            auxiliary,
            experts,
            grad_norm,
            lr,
            time,
            exposed_comm: exposed.total(),
            exposed_by_axis: exposed,
            reading,
            sent,
        })
    }

    /// Reads the first samples of a step while the device still computes the one before it.
    fn read_ahead(&mut self, source: &Source, step: u64) {
        let reads = self.model.part.has_head() || self.model.part.coord.pipe == 0;
        if self.in_flight.read_ahead && reads && step <= self.plan.train.steps as u64 {
            let _span = self.group.tracer().span(SpanKind::Data, "read samples");
            let first = train_sample(self.plan, step, self.first_sample(0));
            self.in_flight.load_ahead(self.plan, &self.device, source, first);
        }
    }

    /// Exposed communication of a step, with the time that the host took to sum the scalars.
    fn exposed(&mut self, summing: Duration, gathering: Waited) -> ExposedTimes {
        let mut exposed = self.groups.take_exposed();
        exposed.add(CommAxis::Data, summing);
        // A GPU gathers after the wait that ends this step, so its gather counts in the next one.
        let gathered = match gathering {
            Waited::Host(_) => Some(gathering),
            Waited::Gpu(..) => self.gathering.replace(gathering),
        };
        if let Some(gathered) = gathered {
            exposed.add(CommAxis::Data, gathered.time());
        }
        exposed
    }

    /// Time of a step that began at `start` and waited for the device until `waited`. A GPU still updates the
    /// parameters when the host begins the next step, so its steps are timed from wait to wait.
    fn step_time(&mut self, start: Instant, waited: Instant) -> Duration {
        match self.device.device_type() {
            DeviceType::Cpu => start.elapsed(),
            DeviceType::Cuda => {
                let before = self.last_step.replace((waited, Instant::now()));
                before.map_or_else(
                    || start.elapsed(),
                    // Without what the host did between the steps.
                    |(before, returned)| (waited - before).saturating_sub(start - returned),
                )
            }
        }
    }

    /// Lets the next step compute its fp8 scales from its own matrices. Delayed scales are not part of a checkpoint: the
    /// step after it forgets them, whether the run continues or is resumed, so that both give the same bits.
    pub fn forget_scales(&self) {
        if let Some(history) = &self.fp8_history {
            history.reset(&self.device);
        }
    }

    /// Bytes that this rank has sent so far.
    fn sent(&self) -> u64 {
        self.groups.sent() + self.group.traffic().bytes
    }

    /// Forward and backward of this rank's micro-batches. Their losses are taken with `take_loss`.
    pub(crate) fn passes(&mut self, source: &Source, step: u64) -> Result<(), Error> {
        self.in_flight.losses.clear();
        let mut pipeline = self.pipeline.take().expect("a rank has its pipeline between passes");
        if let Some(loads) = &mut self.loads {
            loads.begin(&self.device, &self.extra.expert_slots);
        }
        let (device, groups, loads) = (&self.device, &self.groups, self.loads.as_ref());
        let (model, store, in_flight, plan) =
            (&self.model, &mut self.store, &mut self.in_flight, self.plan);
        let updates = LazyUpdates::of(&mut self.optimizer);
        let offload = Offloading {
            updates: updates.as_ref().map(|updates| updates as &dyn PendingUpdates),
            activations: plan.layout.offload.activations(),
        };
        let history = self.fp8_history.as_ref();
        let reads_samples = model.part.has_head() || model.part.coord.pipe == 0;
        // All ranks of the tensor axis compute the loss; one of them counts it.
        let counts_loss = groups.is_tensor_root();
        let result = pipeline.run(device, groups, |Action { stage, act, micro }, input| {
            let _span = groups.tracer().pass(act_name(act), stage, micro);
            let first = first_sample(plan, groups, micro);
            let pass = pass(plan, device, groups, step, first);
            let fp8 = pass.fp8.map(|fp8| Fp8 { history, ..fp8 });
            let pass = Pass { loads, offload, fp8, ..pass };
            let chunk = stage / plan.layout.pipe;
            let slot = chunk * plan.train.accumulation + micro;
            if act == Act::Forward {
                if chunk == 0 && reads_samples {
                    let _span = groups.tracer().span(SpanKind::Data, "read samples");
                    in_flight.load(plan, device, source, micro, train_sample(plan, step, first));
                }
                let mut activations = in_flight.spare.pop().unwrap_or_default();
                let batch = in_flight.batch(micro);
                let at = StagePass { stage: chunk, pass: &pass, batch, defer_weight_grads: false };
                let y = model.forward(&at, input, &mut store.weights, &mut activations);
                in_flight.activations[slot] = Some(activations);
                return y;
            }
            let InFlight { activations, batches, losses, spare, slots, .. } = in_flight;
            let batch = &batches[slots[micro]];
            let fraction = batch.tokens() as f64 / pass.global_tokens as f64;
            let slot = &mut activations[slot];
            let mut activations = slot.take().expect("activations of the forward pass");
            let backward = |activations: &mut Activations, defer_weight_grads| {
                let at = StagePass { stage: chunk, pass: &pass, batch, defer_weight_grads };
                let (dx, loss) = model.backward(&at, input, store, activations);
                if counts_loss {
                    losses.push((loss, fraction));
                }
                dx
            };
            let dx = match act {
                Act::Input => {
                    let dx = backward(&mut activations, true);
                    *slot = Some(activations);
                    return dx;
                }
                Act::Weights => {
                    model.deferred_weight_grads(&pass, store, &mut activations);
                    None
                }
                Act::Backward | Act::Forward => backward(&mut activations, false),
            };
            spare.push(activations);
            // The first chunk is the last one of a micro-batch to go backward.
            if chunk == 0 {
                batches[slots[micro]].release(device);
            }
            dx
        });
        self.pipeline = Some(pipeline);
        result?;
        Ok(())
    }

    /// Completes the optimizer step: with `layout.offload`, updates of the last step may be pending until the next
    /// forward pass uses their blocks.
    pub fn settle(&mut self) {
        self.optimizer.settle(&self.device, &mut self.store.weights);
    }

    /// Sum of squares of the gradients in host memory that this rank adds to the norm. Waits for the device.
    fn host_squares(&self) -> f64 {
        let host = self.store.host_gradients.as_ref().expect("gradients are offloaded");
        host.lock().expect("no thread panics while it holds the gradients").squares()
    }

    /// Sum of squares of the reduced gradients that this rank adds to the norm. None if they are offloaded: then it is
    /// computed when they leave the device.
    fn squares(&self) -> Option<Scalar> {
        if self.store.host_gradients.is_some() {
            return None;
        }
        let own = |(block, unit, range): &(usize, usize, Range<usize>)| {
            self.store.gradients.own(*block, *unit).map(|own| own.part(range.clone()))
        };
        Some(self.device.sum_of_squares(self.norm_ranges.iter().filter_map(own)))
    }

    /// This rank's terms of the loss of the micro-batches that `passes` ran. Waits for the device.
    pub(crate) fn take_loss(&mut self) -> Loss {
        let mut total = Loss::default();
        for (loss, fraction) in self.in_flight.losses.drain(..) {
            let loss = loss.wait();
            total.sum += loss.sum;
            // The auxiliary loss of a micro-batch is weighted by its fraction of the tokens.
            total.auxiliary += loss.auxiliary * fraction;
            total.dropped += loss.dropped;
        }
        total
    }

    /// Index in the global batch of the first sample of a micro-batch of this rank.
    pub(crate) fn first_sample(&self, micro: usize) -> usize {
        first_sample(self.plan, &self.groups, micro)
    }
}

/// Name of an action in a timeline.
fn act_name(act: Act) -> &'static str {
    match act {
        Act::Forward => "forward",
        Act::Backward => "backward",
        Act::Input => "backward (inputs)",
        Act::Weights => "backward (weights)",
    }
}

/// Ranges of this rank's shards that it adds to the gradient norm: each parameter is counted by one rank. Adjacent
/// ranges are merged.
fn norm_ranges(model: &Model) -> Vec<(usize, usize, Range<usize>)> {
    let part = &model.part;
    let mut runs: Vec<(usize, usize, Range<usize>)> = Vec::new();
    for (block, (params, units)) in part.blocks.iter().zip(&part.shards).enumerate() {
        for (unit, shard) in units.iter().enumerate() {
            for (start, param) in params.placed().filter(|(_, param)| part.represents(param)) {
                let Some(own) = shard.within(start..start + param.len()) else { continue };
                match runs.last_mut() {
                    Some((b, u, run)) if (*b, *u, run.end) == (block, unit, own.start) => {
                        run.end = own.end
                    }
                    _ => runs.push((block, unit, own)),
                }
            }
        }
    }
    runs
}
