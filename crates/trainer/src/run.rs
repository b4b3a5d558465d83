//! The loop: step after step, with evaluations, checkpoints and reports when they are due.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use lockstep_ckpt::Disk;
use lockstep_comm::{Group, Op};
use lockstep_data::Source;
use lockstep_events::{Metrics, StepReport, TensorBoard};
use lockstep_kernels::Device;
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Ledger, Plan};
use serde_json::Value;

use crate::rank::dtype;
use crate::start::{build, position};
use crate::{Ended, Error, Rank, Saved, Saver, Start, Stepped, agree, alone, measure_peak};

/// What happens during a run, for whoever shows it. Only rank 0 tells.
pub enum Event<'a> {
    /// A step that is due to be shown.
    Step(&'a StepReport),
    /// The loss on held-out data.
    Evaluated(&'a StepReport),
    /// A checkpoint is there.
    Saved(&'a Saved),
    /// A checkpoint could not be written, for what reason on which rank. The training goes on.
    SaveFailed { step: u64, rank: usize, what: &'a str },
    /// A checkpoint to start from was found broken by a rank; an older one is tried.
    PassedOver { path: &'a Path, rank: usize, what: &'a str },
}

/// What a run needs beside its plan.
pub struct Run<'a> {
    pub plan: &'a Plan,
    pub group: &'a Group,
    pub source: &'a Source,
    /// `runs/NAME`, which exists.
    pub folder: &'a Path,
    /// A checkpoint to start from, and whether to go on with its step and moments.
    pub start: Option<Start>,
}

/// Trains to the plan's last step. Gives the rank's state: a trained model.
pub fn run<'a>(run: &Run<'a>, tell: &mut dyn FnMut(Event<'_>)) -> Result<Rank<'a>, Error> {
    let Run { plan, group, source, folder, .. } = *run;
    let device = Device::cpu(plan.train.threads);
    let peak = measure_peak(&device, dtype(plan));
    let generation = alone(group, || {
        // Whoever trained this run before may not commit from here on.
        let generation = lockstep_ckpt::advance(folder)?;
        lockstep_ckpt::sweep(folder)?;
        Ok::<_, Error>(generation)
    })?;
    let generation = told(group, generation)?;
    let (mut rank, done) = build(run, device, tell)?;
    let mut log = alone(group, || Log::open(folder))?;
    let mut saver = Saver::new(plan, group, folder, generation, Disk::default());
    if plan.checkpoint.every > 0 {
        saver.make_room(&rank)?;
    }
    let mut clock = Clock::new(plan, group.rank(), peak, done);

    for step in done + 1..=plan.train.steps as u64 {
        let stepped = match rank.step(source, step) {
            // All ranks end here: what was saved before is worth waiting for.
            Err(error @ Error::NotFinite { .. }) => {
                conclude(saver.finish()?, step, plan, log.as_mut(), tell)?;
                return Err(error);
            }
            stepped => stepped?,
        };
        clock.add(&stepped);
        let last = step == plan.train.steps as u64;
        let due = |every: usize| last || (every > 0 && step.is_multiple_of(every as u64));

        if due(plan.train.log_every) || step == done + 1 {
            let memory = most_memory(&rank)?;
            let report = clock.report(step, &stepped, memory);
            if let Some(log) = &mut log {
                log.write(&report)?;
                tell(Event::Step(&report));
            }
        }
        if let Some(eval) = plan.train.eval.as_ref().filter(|eval| due(eval.every)) {
            let loss = rank.evaluate(source, eval.batches)?;
            let report = StepReport {
                eval_loss: Some(loss),
                ..StepReport::of(step as usize, plan.train.steps)
            };
            if let Some(log) = &mut log {
                log.write(&report)?;
                tell(Event::Evaluated(&report));
            }
        }
        let word = agree(group, saver.word())?;
        conclude(saver.heard(word)?, step, plan, log.as_mut(), tell)?;
        if due(plan.checkpoint.every) {
            let before = saver.begin(&rank, step, position(plan, source, step))?;
            conclude(before, step, plan, log.as_mut(), tell)?;
        }
    }
    conclude(saver.finish()?, plan.train.steps as u64, plan, log.as_mut(), tell)?;
    Ok(rank)
}

/// Tells how a save ended, at the first rank.
fn conclude(
    ended: Option<Ended>,
    now: u64,
    plan: &Plan,
    log: Option<&mut Log>,
    tell: &mut dyn FnMut(Event<'_>),
) -> Result<(), Error> {
    let (Some(ended), Some(log)) = (ended, log) else { return Ok(()) };
    let more: BTreeMap<String, Value> = match &ended {
        Ended::Saved(saved) => [
            ("saved_step", saved.step.into()),
            ("save_bytes", saved.bytes.into()),
            ("save_s", saved.time.as_secs_f64().into()),
            ("save_stall_s", saved.stall.as_secs_f64().into()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into(),
        Ended::Failed { step, rank, what } => [
            ("save_failed_step", (*step).into()),
            ("save_failed", format!("rank {rank}: {what}").into()),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into(),
    };
    log.write(&StepReport { more, ..StepReport::of(now as usize, plan.train.steps) })?;
    match &ended {
        Ended::Saved(saved) => tell(Event::Saved(saved)),
        Ended::Failed { step, rank, what } => {
            tell(Event::SaveFailed { step: *step, rank: *rank, what })
        }
    }
    Ok(())
}

/// A number of the first rank's, told to all.
fn told(group: &Group, number: Option<u64>) -> Result<u64, Error> {
    let mut number = [number.unwrap_or(0) as i64];
    group.broadcast(&mut number, 0)?;
    Ok(number[0] as u64)
}

/// The largest of any rank.
fn most_memory(rank: &Rank<'_>) -> Result<u64, Error> {
    let mut bytes = [rank.device.memory().total.peak as i64];
    rank.group.all_reduce(&mut bytes, Op::Max)?;
    Ok(bytes[0] as u64)
}

/// The files that a run writes as it goes.
struct Log {
    metrics: Metrics,
    board: TensorBoard,
}

impl Log {
    fn open(folder: &Path) -> Result<Log, Error> {
        let board = folder.join("tensorboard");
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |cause| Error::Folder { path, cause }
        };
        std::fs::create_dir_all(&board).map_err(failed(&board))?;
        let metrics = folder.join("metrics.jsonl");
        Ok(Log {
            metrics: Metrics::open(&metrics).map_err(failed(&metrics))?,
            board: TensorBoard::create(&board).map_err(failed(&board))?,
        })
    }

    fn write(&mut self, report: &StepReport) -> Result<(), Error> {
        let failed = |cause| Error::Folder { path: "metrics.jsonl".into(), cause };
        self.metrics.write(report).map_err(failed)?;
        self.board.write(report).map_err(failed)
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
            before,
            done: 0,
        }
    }

    fn add(&mut self, stepped: &Stepped) {
        self.steps += 1;
        self.done += 1;
        self.time += stepped.time;
        self.exchange += stepped.exchange;
    }

    fn report(&mut self, step: u64, stepped: &Stepped, memory: u64) -> StepReport {
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
            more: [("comm_bytes".to_string(), stepped.sent.into())].into(),
            mem_bytes: Some(memory),
            mem_planned_bytes: Some(self.planned),
            tokens: Some((self.before + self.done) * plan.tokens_per_step() as u64),
            elapsed_s: Some(self.begun.elapsed().as_secs_f64()),
            eta: Some(Duration::from_secs_f64(left * per_step)),
            ..StepReport::of(step as usize, plan.train.steps)
        };
        (self.steps, self.time, self.exchange) = (0, Duration::ZERO, Duration::ZERO);
        report
    }
}
