//! The training loop with evaluations, checkpoints and reports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_ckpt::Disk;
use lockstep_comm::Group;
use lockstep_comm::trace::CommAxis;
use lockstep_data::{Source, Split};
use lockstep_events::{Metrics, RankTimes, RankTimesFile, StepReport, TensorBoard};
use lockstep_kernels::{Device, OutOfMemory, Tag};
use lockstep_parallel::ExposedTimes;
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Ledger, Plan};
use serde_json::Value;

use crate::final_save::FinalSave;
use crate::from_plan::dtype;
use crate::peak::PeakRate;
use crate::replicas::COMPARE_EVERY;
use crate::run_queue::RunQueue;
use crate::start::{build, position};
use crate::straggler::{Times, median};
use crate::straggler_monitor::{ReportTimes, StragglerMonitor};
use crate::timeline::{MergedTrace, TimelineRecorder};
use crate::{
    Error, FailedSave, Flags, Rank, SaveOutcome, SavedCheckpoint, Saver, Slow, Start, StepResult,
    agree, measure_peak, on_rank_zero,
};

/// Progress of a run, reported on rank 0 only.
pub enum Event<'a> {
    /// Report of the steps since the last report.
    Step(&'a StepReport),
    /// Loss on held-out data.
    Evaluated(&'a StepReport),
    /// A checkpoint was committed.
    Saved(&'a SavedCheckpoint),
    /// A checkpoint could not be saved.
    SaveFailed(&'a FailedSave),
    /// `rank` could not load a checkpoint; the next older one is tried.
    SkippedCheckpoint { path: &'a Path, rank: usize, what: &'a str },
    /// The run starts from a checkpoint: resumes it, or takes only its weights.
    Loaded { path: &'a Path, resume: bool },
    /// The time that a step takes at the peak speed of the machine. A step takes longer.
    Expected { step_s: f64 },
    /// A rank or link slows down the run. Reported when first detected, then at growing intervals.
    Slow(&'a Slow),
    /// A timeline was written.
    Traced(&'a MergedTrace),
}

/// Inputs of a run.
pub struct Run<'a> {
    pub plan: &'a Plan,
    /// The device of this rank.
    pub device: Device,
    pub group: &'a Group,
    pub source: &'a Source,
    /// The existing folder `runs/NAME`.
    pub folder: &'a Path,
    /// Checkpoint to start from; random parameters if `None`.
    pub start: Option<Start>,
    /// Generation that the launcher claimed for these ranks; if `None`, they claim the next one.
    pub generation: Option<u64>,
    /// Returns whether this rank was asked to stop. If any rank was, all ranks save after the current step and stop.
    pub stop: &'a dyn Fn() -> bool,
}

/// A run that reached its last step or was asked to stop.
pub struct Finished<'a> {
    pub rank: Rank<'a>,
    /// The step after which the run saved and stopped, if it was asked to.
    pub stopped: Option<u64>,
    /// Bytes of memory that snapshots used on this rank.
    pub snapshot_bytes: u64,
}

/// Trains to the last step of the plan, or until a rank is asked to stop. Collective.
pub fn run<'a>(run: &Run<'a>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Finished<'a>, Error> {
    // The state is dropped with the error, so nothing sees it half changed.
    OutOfMemory::catch(|| train(run, on_event)).map_err(Error::OutOfMemory)?
}

fn train<'a>(run: &Run<'a>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Finished<'a>, Error> {
    let Run { plan, group, source, folder, .. } = *run;
    let measure = || measure_peak(&run.device, dtype(plan));
    let peak = measure();
    run.device.reset_peaks();
    let generation = on_rank_zero(group, || {
        // From here on, ranks of older generations can no longer commit checkpoints.
        let generation = match run.generation {
            Some(own) => lockstep_ckpt::claim(folder, own).map(|()| own)?,
            None => lockstep_ckpt::advance(folder)?,
        };
        lockstep_ckpt::sweep(folder)?;
        Ok::<_, Error>(generation)
    })?;
    let generation = broadcast(group, generation)?;
    let (mut rank, done) = build(run, on_event)?;
    let mut log = on_rank_zero(group, || Log::open(folder, done))?;
    let mut saver = Saver::new(plan, group, folder, generation, Disk::default());
    saver.trust(done);
    if plan.checkpoint.every > 0 {
        saver.preallocate(&rank);
    }
    let mut clock = Clock::new(plan, PeakRate::new(peak), done);
    clock.epoch_tokens = source.epoch_tokens(Split::Train);
    if group.rank() == 0 {
        on_event(Event::Expected { step_s: clock.flops() / (peak * plan.ranks as f64) });
    }
    let mut monitor = StragglerMonitor::new(plan, group)?;
    let mut timeline = TimelineRecorder::new(plan, group, folder);

    // Asked to stop during the set-up: nothing has changed yet.
    if agree(group, Flags { stop: (run.stop)(), ..Flags::default() })?.stop {
        return Ok(Finished { rank, stopped: Some(done), snapshot_bytes: 0 });
    }
    for step in done + 1..=plan.train.steps as u64 {
        timeline.begin(&rank, step)?;
        let stepped = match rank.step(source, step) {
            // All ranks get this error. Finish the pending checkpoint and save the state before the step.
            Err(error @ Error::NotFinite { .. }) => {
                report_save(saver.finish()?, step, plan, log.as_mut(), on_event);
                if let Err(error) = save_failed_state(&rank, run, step) {
                    tracing::warn!("cannot save the state before step {step}: {error}");
                }
                return Err(error);
            }
            stepped => stepped?,
        };
        clock.add(&stepped);
        let last = step == plan.train.steps as u64;
        let due = |every: usize| last || (every > 0 && step.is_multiple_of(every as u64));

        if due(plan.train.log_every) || step == done + 1 {
            // The first step fills caches and pools; its times do not count.
            let timed_steps = if step == done + 1 { 0 } else { clock.steps };
            let memory = rank.device.memory().total.peak as u64 + saver.snapshot_bytes();
            let times = monitor.report(&rank, clock.times(), memory, timed_steps)?;
            if group.rank() == 0 {
                clock.peak.raise_to(clock.flops_per_s() / plan.ranks as f64, measure);
            }
            let mut report = clock.report(step, &stepped, &times, rank.extra.skipped_samples);
            report.more.insert("memory_by_tag".into(), memory_by_tag(&rank.device));
            if let Some(log) = &mut log {
                log.write(&report);
                log.write_ranks(step, &times, rank.expert_loads());
                on_event(Event::Step(&report));
                if let Some(slow) = times.slow.as_ref().filter(|_| times.warn) {
                    on_event(Event::Slow(slow));
                }
            }
        }
        if let Some(eval) = plan.train.eval.as_ref().filter(|eval| due(eval.every)) {
            let loss = rank.evaluate(source, eval.batches)?;
            let report = StepReport {
                eval_loss: Some(loss),
                ..StepReport::of(step as usize, plan.train.steps)
            };
            if let Some(log) = &mut log {
                log.write(&report);
                on_event(Event::Evaluated(&report));
            }
        }
        let mine = Flags { stop: (run.stop)(), trace: timeline.requested(), ..saver.flags() };
        let flags = agree(group, mine)?;
        let saved = saver.advance(flags)?;
        check_fenced(saved.as_ref(), folder, generation)?;
        report_save(saved, step, plan, log.as_mut(), on_event);
        let saves = flags.stop || due(plan.checkpoint.every);
        // A checkpoint must not contain the parameters of a replica that went wrong.
        if saves || last || step.is_multiple_of(COMPARE_EVERY) {
            rank.settle();
        }
        if saves || step.is_multiple_of(COMPARE_EVERY) {
            rank.check_replicas(step)?;
        }
        if saves {
            let previous = saver.begin(&rank, step, position(plan, source, step))?;
            check_fenced(previous.as_ref(), folder, generation)?;
            report_save(previous, step, plan, log.as_mut(), on_event);
            rank.forget_scales();
        }
        if last || flags.stop {
            let (rank, stopping) = (&rank, flags.stop);
            let save = FinalSave { run, rank, step, generation, stopping };
            save.complete(&mut saver, &mut |outcome| {
                report_save(Some(outcome), step, plan, log.as_mut(), on_event);
            })?;
        }
        let traced = timeline.end(&rank, step, &stepped)?;
        let traced = traced.or_else(|| (last || flags.stop).then(|| timeline.finish()).flatten());
        if let Some(traced) = &traced {
            on_event(Event::Traced(traced));
        }
        timeline.request(step, flags.trace);
        if flags.stop && !last {
            let snapshot_bytes = saver.snapshot_bytes();
            return Ok(Finished { rank, stopped: Some(step), snapshot_bytes });
        }
    }
    Ok(Finished { rank, stopped: None, snapshot_bytes: saver.snapshot_bytes() })
}

/// Logs and reports the outcome of a checkpoint on rank 0.
fn report_save(
    outcome: Option<SaveOutcome>,
    step: u64,
    plan: &Plan,
    log: Option<&mut Log>,
    on_event: &mut dyn FnMut(Event<'_>),
) {
    let (Some(outcome), Some(log)) = (outcome, log) else { return };
    let more: BTreeMap<String, Value> = match &outcome {
        SaveOutcome::Saved(saved) => [
            ("saved_step", saved.step.into()),
            ("save_bytes", saved.bytes.into()),
            ("save_s", saved.time.as_secs_f64().into()),
            ("save_stall_s", saved.stall.as_secs_f64().into()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into(),
        SaveOutcome::Failed(FailedSave { step, rank, what, .. }) => [
            ("save_failed_step", (*step).into()),
            ("save_failed", format!("rank {rank}: {what}").into()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into(),
    };
    log.write(&StepReport { more, ..StepReport::of(step as usize, plan.train.steps) });
    match &outcome {
        SaveOutcome::Saved(saved) => on_event(Event::Saved(saved)),
        SaveOutcome::Failed(failed) => on_event(Event::SaveFailed(failed)),
    }
}

/// Fails if a checkpoint could not be saved because a newer generation trains this run.
pub(crate) fn check_fenced(
    outcome: Option<&SaveOutcome>,
    folder: &Path,
    generation: u64,
) -> Result<(), Error> {
    if let Some(SaveOutcome::Failed(_)) = outcome {
        let newest = lockstep_ckpt::newest(folder)?;
        if newest > generation {
            let run = folder.to_path_buf();
            return Err(lockstep_ckpt::Error::Fenced { run, generation, newest }.into());
        }
    }
    Ok(())
}

/// Broadcasts a number from rank 0.
fn broadcast(group: &Group, number: Option<u64>) -> Result<u64, Error> {
    let mut number = [number.unwrap_or(0) as i64];
    group.broadcast(&mut number, 0)?;
    Ok(number[0] as u64)
}

/// Saves the state before a step that was not finite, so that `replay` can start from it instead of repeating all steps
/// since the last checkpoint. It is stored in `RUN/failed`, so that a run does not resume from it by accident.
fn save_failed_state(rank: &Rank<'_>, run: &Run<'_>, step: u64) -> Result<(), Error> {
    let Run { plan, group, source, .. } = *run;
    let failed = failed_dir(run.folder);
    // Replaces the state of an earlier failure.
    on_rank_zero(group, || {
        let removed = if failed.exists() { std::fs::remove_dir_all(&failed) } else { Ok(()) };
        removed.map_err(|cause| Error::Folder { path: failed.clone(), cause })
    })?;
    let mut saver = Saver::new(plan, group, &failed, 0, Disk::default());
    saver.begin(rank, step - 1, position(plan, source, step - 1))?;
    if let Some(SaveOutcome::Failed(FailedSave { rank, what, .. })) = saver.finish()? {
        tracing::warn!("cannot save the state before step {step}: rank {rank}: {what}");
    }
    Ok(())
}

/// Directory of the state before a failed step; has the layout of a run folder.
pub fn failed_dir(run: &Path) -> PathBuf {
    run.join("failed")
}

/// Metrics and TensorBoard files of a run. A write error is a warning and does not stop training.
struct Log {
    metrics: Metrics,
    board: TensorBoard,
    ranks: RankTimesFile,
    /// The last report could not be written.
    write_failed: bool,
}

impl Log {
    /// Opens the files and drops reports of steps after `done`, which are repeated.
    fn open(folder: &Path, done: u64) -> Result<Log, Error> {
        let board = folder.join("tensorboard");
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |cause| Error::Folder { path, cause }
        };
        std::fs::create_dir_all(&board).map_err(failed(&board))?;
        let metrics = folder.join("metrics.jsonl");
        let ranks = folder.join("ranks.jsonl");
        Ok(Log {
            metrics: Metrics::open_after(&metrics, done).map_err(failed(&metrics))?,
            board: TensorBoard::create_after(&board, done).map_err(failed(&board))?,
            ranks: RankTimesFile::open_after(&ranks, done).map_err(failed(&ranks))?,
            write_failed: false,
        })
    }

    fn write(&mut self, report: &StepReport) {
        let written = self.metrics.write(report).and(self.board.write(report));
        if let (Err(error), false) = (&written, self.write_failed) {
            tracing::warn!(
                "{error}; training continues, but reports are lost until they can be written again"
            );
        }
        self.write_failed = written.is_err();
    }

    /// Writes the times of all ranks. An error is reported by `write`, which meets the same disk.
    fn write_ranks(&mut self, step: u64, times: &ReportTimes, experts: Vec<Vec<f32>>) {
        let ms = |of: fn(&Times) -> f64| -> Vec<f32> {
            // Microseconds are enough.
            times.times.iter().map(|times| (of(times) * 1e6).round() as f32 / 1e3).collect()
        };
        let has_pipe = times.times.iter().any(|times| times.pipe > 0.0);
        let _ = self.ranks.write(&RankTimes {
            step: step as usize,
            compute_ms: ms(|times| times.computing),
            wait_ms: ms(|times| times.waiting),
            pipe_ms: if has_pipe { ms(|times| times.pipe) } else { Vec::new() },
            read_ms: ms(|times| times.reading),
            queue_ms: ms(|times| times.queued),
            memory: times.memories.clone(),
            experts,
        });
    }
}

/// Peak memory of this rank by tag.
fn memory_by_tag(device: &Device) -> Value {
    let memory = device.memory();
    let of = |tag: Tag| (tag.name().to_string(), Value::from(memory.of(tag).peak));
    Value::Object(Tag::ALL.into_iter().map(of).collect())
}

/// Times of the steps since the last report.
struct Clock<'a> {
    plan: &'a Plan,
    /// Peak FLOP/s of one rank.
    peak: PeakRate,
    planned_memory: u64,
    /// Tokens of one pass over the training data.
    epoch_tokens: Option<u64>,
    start: Instant,
    /// Since the last report.
    steps: u64,
    time: Duration,
    exposed_comm: Duration,
    exposed_by_axis: ExposedTimes,
    reading: Duration,
    queue: RunQueue,
    /// Steps before the run was started or resumed.
    before: u64,
    /// Steps since then.
    done: u64,
}

impl<'a> Clock<'a> {
    fn new(plan: &'a Plan, peak: PeakRate, before: u64) -> Clock<'a> {
        Clock {
            plan,
            peak,
            planned_memory: Ledger::largest(plan).total() as u64,
            epoch_tokens: None,
            start: Instant::now(),
            steps: 0,
            time: Duration::ZERO,
            exposed_comm: Duration::ZERO,
            exposed_by_axis: ExposedTimes::default(),
            reading: Duration::ZERO,
            queue: RunQueue::default(),
            before,
            done: 0,
        }
    }

    /// FLOPs of a step on all ranks.
    fn flops(&self) -> f64 {
        let per_token = flops_per_token(&self.plan.model, self.plan.data.seq).total();
        per_token * self.plan.tokens_per_step() as f64
    }

    fn add(&mut self, stepped: &StepResult) {
        self.steps += 1;
        self.done += 1;
        self.time += stepped.time;
        self.exposed_comm += stepped.exposed_comm;
        self.exposed_by_axis += stepped.exposed_by_axis;
        self.reading += stepped.reading;
    }

    /// Times of this rank, per step.
    fn times(&mut self) -> Times {
        let queued = self.queue.take();
        let per_step = |time: Duration| time.as_secs_f64() / self.steps as f64;
        Times {
            computing: per_step(self.time.saturating_sub(self.exposed_comm)),
            waiting: per_step(self.exposed_comm),
            reading: per_step(self.reading),
            pipe: per_step(self.exposed_by_axis.of(CommAxis::Pipe)),
            queued: queued.as_secs_f64() / self.steps as f64,
        }
    }

    /// Tokens per second of all ranks since the last report.
    fn tokens_per_s(&self) -> f64 {
        (self.steps as usize * self.plan.tokens_per_step()) as f64 / self.time.as_secs_f64()
    }

    /// FLOP/s of the model on all ranks since the last report.
    fn flops_per_s(&self) -> f64 {
        self.steps as f64 * self.flops() / self.time.as_secs_f64()
    }

    fn report(
        &mut self,
        step: u64,
        stepped: &StepResult,
        times: &ReportTimes,
        skipped: u64,
    ) -> StepReport {
        let (plan, seconds) = (self.plan, self.time.as_secs_f64());
        let tokens_per_s = self.tokens_per_s();
        let peak = self.peak.flops_per_s() * plan.ranks as f64;
        let left = (plan.train.steps as u64 - step) as f64;
        let per_step = self.start.elapsed().as_secs_f64() / self.done as f64;
        let tokens = (self.before + self.done) * plan.tokens_per_step() as u64;
        let report = StepReport {
            epoch: self.epoch_tokens.map(|epoch| tokens as f64 / epoch as f64),
            loss: Some(stepped.loss),
            grad_norm: Some(stepped.grad_norm),
            lr: Some(stepped.lr),
            tokens_per_s: Some(tokens_per_s),
            mfu: Some(self.flops_per_s() / peak),
            comm_exposed: Some(self.exposed_comm.as_secs_f64() / seconds),
            more: self.extra_metrics(stepped, times, skipped),
            expert_load_min: stepped.experts.map(|experts| experts.min),
            expert_load_max: stepped.experts.map(|experts| experts.max),
            expert_imbalance: stepped.experts.map(|experts| experts.imbalance),
            dropped_fraction: stepped.experts.and_then(|experts| experts.dropped_fraction),
            mem_bytes: Some(times.memory),
            mem_planned_bytes: Some(self.planned_memory),
            tokens: Some(tokens),
            elapsed_s: Some(self.start.elapsed().as_secs_f64()),
            eta: Some(Duration::from_secs_f64(left * per_step)),
            ..StepReport::of(step as usize, plan.train.steps)
        };
        (self.time, self.exposed_comm, self.reading) = Default::default();
        self.exposed_by_axis = ExposedTimes::default();
        self.steps = 0;
        report
    }

    /// Metrics that are written to metrics.jsonl but not printed.
    fn extra_metrics(
        &self,
        stepped: &StepResult,
        times: &ReportTimes,
        skipped: u64,
    ) -> BTreeMap<String, Value> {
        let of = |part: fn(&Times) -> f64| times.times.iter().map(part);
        let most = |part: fn(&Times) -> f64| of(part).fold(0.0, f64::max);
        let exposed = CommAxis::ALL.into_iter().filter_map(|axis| {
            let seconds = self.exposed_by_axis.of(axis).as_secs_f64() / self.steps as f64;
            (seconds > 0.0).then(|| (axis.name().to_string(), Value::from(seconds)))
        });
        let mut more = vec![
            ("comm_bytes", stepped.sent.into()),
            ("compute_s", median(of(|times| times.computing)).into()),
            ("compute_s_most", most(|times| times.computing).into()),
            ("read_s", most(|times| times.reading).into()),
            ("queue_s", median(of(|times| times.queued)).into()),
            ("exposed_s", Value::Object(exposed.collect())),
            ("peak_flops", self.peak.flops_per_s().into()),
            ("corrupt_samples", skipped.into()),
        ];
        more.extend(times.slow.as_ref().map(Slow::metric));
        more.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }
}
