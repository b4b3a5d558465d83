//! The loop: step after step, with evaluations, checkpoints and reports when they are due.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_ckpt::Disk;
use lockstep_comm::Group;
use lockstep_data::Source;
use lockstep_events::{Metrics, StepReport, TensorBoard};
use lockstep_kernels::Device;
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Ledger, Plan};
use serde_json::Value;

use crate::rank::dtype;
use crate::start::{build, position};
use crate::straggler::{Times, median};
use crate::straggler_monitor::{ReportTimes, StragglerMonitor};
use crate::{
    Error, Flags, Rank, SaveOutcome, SavedCheckpoint, Saver, Slow, Start, StepResult, agree,
    measure_peak, on_rank_zero,
};

/// What happens during a run, for whoever shows it. Only rank 0 tells.
pub enum Event<'a> {
    /// A step that is due to be shown.
    Step(&'a StepReport),
    /// The loss on held-out data.
    Evaluated(&'a StepReport),
    /// A checkpoint is there.
    Saved(&'a SavedCheckpoint),
    /// A checkpoint could not be written, for what reason on which rank. The training goes on.
    SaveFailed { step: u64, rank: usize, what: &'a str },
    /// A checkpoint to start from was found broken by a rank; an older one is tried.
    SkippedCheckpoint { path: &'a Path, rank: usize, what: &'a str },
    /// A rank or a link that holds the others up: told when it is first seen, and rarely again.
    Slow(&'a Slow),
}

/// What a run needs beside its plan.
pub struct Run<'a> {
    pub plan: &'a Plan,
    /// The device of this rank.
    pub device: Device,
    pub group: &'a Group,
    pub source: &'a Source,
    /// `runs/NAME`, which exists.
    pub folder: &'a Path,
    /// A checkpoint to start from, and whether to go on with its step and moments.
    pub start: Option<Start>,
    /// The generation that the launcher has taken for these ranks in the run's folder; without one they take the next
    /// themselves.
    pub generation: Option<u64>,
    /// Whether this rank has been asked to stop. When any has, all save after the step at hand and stop.
    pub stop: &'a dyn Fn() -> bool,
}

/// How a run ended.
pub struct Finished<'a> {
    /// The rank's state: a trained model.
    pub rank: Rank<'a>,
    /// The step after which it stopped, when it was asked to; what was done until then is saved.
    pub stopped: Option<u64>,
}

/// Trains to the plan's last step, or until it is asked to stop.
pub fn run<'a>(run: &Run<'a>, tell: &mut dyn FnMut(Event<'_>)) -> Result<Finished<'a>, Error> {
    let Run { plan, group, source, folder, .. } = *run;
    let peak = measure_peak(&run.device, dtype(plan));
    let generation = on_rank_zero(group, || {
        // Whoever trained this run before may not commit from here on.
        let generation = match run.generation {
            Some(own) => lockstep_ckpt::claim(folder, own).map(|()| own)?,
            None => lockstep_ckpt::advance(folder)?,
        };
        lockstep_ckpt::sweep(folder)?;
        Ok::<_, Error>(generation)
    })?;
    let generation = told(group, generation)?;
    let (mut rank, done) = build(run, tell)?;
    let mut log = on_rank_zero(group, || Log::open(folder, done))?;
    let mut saver = Saver::new(plan, group, folder, generation, Disk::default());
    if plan.checkpoint.every > 0 {
        saver.make_room(&rank);
    }
    let mut clock = Clock::new(plan, group.rank(), peak, done);
    let mut lookout = StragglerMonitor::new(plan, group)?;

    // Asked while it was being built: everything is as it was.
    if agree(group, Flags { stop: (run.stop)(), ..Flags::default() })?.stop {
        return Ok(Finished { rank, stopped: Some(done) });
    }
    for step in done + 1..=plan.train.steps as u64 {
        let stepped = match rank.step(source, step) {
            // All ranks end here: what was saved before is worth waiting for, and the state too.
            Err(error @ Error::NotFinite { .. }) => {
                conclude(saver.finish()?, step, plan, log.as_mut(), tell);
                if let Err(trouble) = keep_failed(&rank, run, step) {
                    tracing::warn!("the state before step {step} could not be saved: {trouble}");
                }
                return Err(error);
            }
            stepped => stepped?,
        };
        clock.add(&stepped);
        let last = step == plan.train.steps as u64;
        let due = |every: usize| last || (every > 0 && step.is_multiple_of(every as u64));

        if due(plan.train.log_every) || step == done + 1 {
            let counted = if step == done + 1 { 0 } else { clock.steps };
            let view = lookout.look(&rank, clock.times(), counted)?;
            let report = clock.report(step, &stepped, &view, rank.extra.skipped_samples);
            if let Some(log) = &mut log {
                log.write(&report);
                tell(Event::Step(&report));
                if let Some(slow) = view.slow.as_ref().filter(|_| view.tell) {
                    tell(Event::Slow(slow));
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
                tell(Event::Evaluated(&report));
            }
        }
        let word = agree(group, Flags { stop: (run.stop)(), ..saver.word() })?;
        let ended = saver.heard(word)?;
        unfenced(ended.as_ref(), folder, generation)?;
        conclude(ended, step, plan, log.as_mut(), tell);
        if word.stop || due(plan.checkpoint.every) {
            let before = saver.begin(&rank, step, position(plan, source, step))?;
            unfenced(before.as_ref(), folder, generation)?;
            conclude(before, step, plan, log.as_mut(), tell);
        }
        if word.stop && !last {
            let saved = last_save(saver.finish()?, folder, generation)?;
            conclude(saved, step, plan, log.as_mut(), tell);
            return Ok(Finished { rank, stopped: Some(step) });
        }
    }
    let saved = last_save(saver.finish()?, folder, generation)?;
    conclude(saved, plan.train.steps as u64, plan, log.as_mut(), tell);
    Ok(Finished { rank, stopped: None })
}

/// Tells how a save ended, at the first rank.
fn conclude(
    ended: Option<SaveOutcome>,
    now: u64,
    plan: &Plan,
    log: Option<&mut Log>,
    tell: &mut dyn FnMut(Event<'_>),
) {
    let (Some(ended), Some(log)) = (ended, log) else { return };
    let more: BTreeMap<String, Value> = match &ended {
        SaveOutcome::Saved(saved) => [
            ("saved_step", saved.step.into()),
            ("save_bytes", saved.bytes.into()),
            ("save_s", saved.time.as_secs_f64().into()),
            ("save_stall_s", saved.stall.as_secs_f64().into()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into(),
        SaveOutcome::Failed { step, rank, what } => [
            ("save_failed_step", (*step).into()),
            ("save_failed", format!("rank {rank}: {what}").into()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into(),
    };
    log.write(&StepReport { more, ..StepReport::of(now as usize, plan.train.steps) });
    match &ended {
        SaveOutcome::Saved(saved) => tell(Event::Saved(saved)),
        SaveOutcome::Failed { step, rank, what } => {
            tell(Event::SaveFailed { step: *step, rank: *rank, what })
        }
    }
}

/// A save that failed because others train this run by now ends these ranks: they came back from the dead.
fn unfenced(ended: Option<&SaveOutcome>, folder: &Path, generation: u64) -> Result<(), Error> {
    if let Some(SaveOutcome::Failed { .. }) = ended {
        let newest = lockstep_ckpt::newest(folder)?;
        if newest > generation {
            let run = folder.to_path_buf();
            return Err(lockstep_ckpt::Error::Fenced { run, generation, newest }.into());
        }
    }
    Ok(())
}

/// Whoever is told that a run stopped or is done may rely on what was saved: a last save that failed is an error.
fn last_save(
    ended: Option<SaveOutcome>,
    folder: &Path,
    generation: u64,
) -> Result<Option<SaveOutcome>, Error> {
    unfenced(ended.as_ref(), folder, generation)?;
    match ended {
        Some(SaveOutcome::Failed { rank, what, .. }) => Err(Error::Elsewhere { rank, what }),
        ended => Ok(ended),
    }
}

/// A number of the first rank's, told to all.
fn told(group: &Group, number: Option<u64>) -> Result<u64, Error> {
    let mut number = [number.unwrap_or(0) as i64];
    group.broadcast(&mut number, 0)?;
    Ok(number[0] as u64)
}

/// Saves the state before a step that came out as no number, which is still what it was: so the step can be done
/// again at once (see `replay`), and not only after all steps since the last checkpoint. It lies apart, in
/// `RUN/failed`: nobody wants to go on from it unseen.
fn keep_failed(rank: &Rank<'_>, run: &Run<'_>, step: u64) -> Result<(), Error> {
    let Run { plan, group, source, .. } = *run;
    let failed = failed(run.folder);
    // One is enough: that of an earlier failure goes.
    on_rank_zero(group, || {
        let gone = if failed.exists() { std::fs::remove_dir_all(&failed) } else { Ok(()) };
        gone.map_err(|cause| Error::Folder { path: failed.clone(), cause })
    })?;
    let mut saver = Saver::new(plan, group, &failed, 0, Disk::default());
    saver.begin(rank, step - 1, position(plan, source, step - 1))?;
    if let Some(SaveOutcome::Failed { rank, what, .. }) = saver.finish()? {
        tracing::warn!("the state before step {step} could not be saved: rank {rank}: {what}");
    }
    Ok(())
}

/// Where the state before a step that failed lies, as in a run folder of its own.
pub fn failed(run: &Path) -> PathBuf {
    run.join("failed")
}

/// The files that a run writes as it goes. What cannot be written there is told of, and ends no training.
struct Log {
    metrics: Metrics,
    board: TensorBoard,
    /// The last report found no room.
    full: bool,
}

impl Log {
    /// What is there of steps after `done` is dropped: they are taken again.
    fn open(folder: &Path, done: u64) -> Result<Log, Error> {
        let board = folder.join("tensorboard");
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |cause| Error::Folder { path, cause }
        };
        std::fs::create_dir_all(&board).map_err(failed(&board))?;
        let metrics = folder.join("metrics.jsonl");
        Ok(Log {
            metrics: Metrics::open_after(&metrics, done).map_err(failed(&metrics))?,
            board: TensorBoard::create_after(&board, done).map_err(failed(&board))?,
            full: false,
        })
    }

    fn write(&mut self, report: &StepReport) {
        let written = self.metrics.write(report).and(self.board.write(report));
        if let (Err(error), false) = (&written, self.full) {
            tracing::warn!(
                "{error}; the training goes on, and reports are missing until there is room"
            );
        }
        self.full = written.is_err();
    }
}

/// Times of the steps since the last report.
struct Clock<'a> {
    plan: &'a Plan,
    /// Operations per second that all ranks together could do.
    peak: f64,
    planned: u64,
    begun: Instant,
    /// Since the last report.
    steps: u64,
    time: Duration,
    exchange: Duration,
    reading: Duration,
    /// Done when the run was started, and since.
    before: u64,
    done: u64,
}

impl<'a> Clock<'a> {
    fn new(plan: &'a Plan, rank: usize, peak: f64, before: u64) -> Clock<'a> {
        Clock {
            plan,
            peak: peak * plan.ranks as f64,
            planned: Ledger::of(plan, rank).total() as u64,
            begun: Instant::now(),
            steps: 0,
            time: Duration::ZERO,
            exchange: Duration::ZERO,
            reading: Duration::ZERO,
            before,
            done: 0,
        }
    }

    fn add(&mut self, stepped: &StepResult) {
        self.steps += 1;
        self.done += 1;
        self.time += stepped.time;
        self.exchange += stepped.exchange;
        self.reading += stepped.reading;
    }

    /// Of this rank, per step.
    fn times(&self) -> Times {
        let per_step = |time: Duration| time.as_secs_f64() / self.steps as f64;
        Times {
            computing: per_step(self.time.saturating_sub(self.exchange)),
            waiting: per_step(self.exchange),
            reading: per_step(self.reading),
        }
    }

    fn report(
        &mut self,
        step: u64,
        stepped: &StepResult,
        view: &ReportTimes,
        skipped: u64,
    ) -> StepReport {
        let (plan, seconds) = (self.plan, self.time.as_secs_f64());
        let tokens_per_s = (self.steps as usize * plan.tokens_per_step()) as f64 / seconds;
        let flops = flops_per_token(&plan.model, plan.data.seq).total();
        let left = (plan.train.steps as u64 - step) as f64;
        let per_step = self.begun.elapsed().as_secs_f64() / self.done as f64;
        let report = StepReport {
            loss: Some(stepped.loss),
            grad_norm: Some(stepped.grad_norm),
            lr: Some(stepped.lr),
            tokens_per_s: Some(tokens_per_s),
            mfu: Some(tokens_per_s * flops / self.peak),
            comm_exposed: Some(self.exchange.as_secs_f64() / seconds),
            more: more(stepped, view, skipped),
            mem_bytes: Some(view.memory),
            mem_planned_bytes: Some(self.planned),
            tokens: Some((self.before + self.done) * plan.tokens_per_step() as u64),
            elapsed_s: Some(self.begun.elapsed().as_secs_f64()),
            eta: Some(Duration::from_secs_f64(left * per_step)),
            ..StepReport::of(step as usize, plan.train.steps)
        };
        (self.time, self.exchange, self.reading) = Default::default();
        self.steps = 0;
        report
    }
}

/// What programs may want to know of a report beside its line.
fn more(stepped: &StepResult, view: &ReportTimes, skipped: u64) -> BTreeMap<String, Value> {
    let computing = || view.times.iter().map(|times| times.computing);
    let mut more = vec![
        ("comm_bytes", stepped.sent.into()),
        ("compute_s", median(computing()).into()),
        ("compute_s_most", computing().fold(0.0, f64::max).into()),
        ("corrupt_samples", skipped.into()),
    ];
    more.extend(view.slow.as_ref().map(Slow::metric));
    more.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}
