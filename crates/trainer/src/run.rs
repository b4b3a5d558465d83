//! The loop: step after step, with evaluations, checkpoints and reports when they are due.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_comm::{Group, Op};
use lockstep_data::Source;
use lockstep_events::{Metrics, StepReport, TensorBoard};
use lockstep_kernels::Device;
use lockstep_plan::model::{Balance, Moe, Shape, flops_per_token};
use lockstep_plan::{Ledger, Plan};
use serde_json::Value;

use crate::lookout::{Lookout, View};
use crate::pace::{Times, median};
use crate::rank::dtype;
use crate::stored::load_weights;
use crate::{Error, Rank, Slow, Stepped, alone, measure_peak};

/// What happens during a run, for whoever shows it. Only rank 0 tells.
pub enum Event<'a> {
    /// A step that is due to be shown.
    Step(&'a StepReport),
    /// The loss on held-out data.
    Evaluated(&'a StepReport),
    Saved(&'a Path),
    /// A rank or a link that holds the others up: told when it is first seen, and rarely again.
    Slow(&'a Slow),
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

/// Where a run starts when not at random.
pub struct Start {
    pub checkpoint: PathBuf,
    pub resume: bool,
}

/// Trains to the plan's last step, or until it is asked to stop.
pub fn run<'a>(run: &Run<'a>, tell: &mut dyn FnMut(Event<'_>)) -> Result<Finished<'a>, Error> {
    let Run { plan, group, source, folder, .. } = *run;
    let device = Device::cpu(plan.train.threads);
    let peak = measure_peak(&device, dtype(plan));
    let (mut rank, done) = build(run, device)?;
    let mut log = alone(group, || {
        lockstep_ckpt::sweep(folder)?;
        Log::open(folder, done)
    })?;
    let mut clock = Clock::new(plan, group.rank(), peak, done);
    let mut lookout = Lookout::new(plan, group)?;

    // Asked while it was being built: everything is as it was.
    if asked(run)? {
        return Ok(Finished { rank, stopped: Some(done) });
    }
    for step in done + 1..=plan.train.steps as u64 {
        let stepped = match rank.step(source, step) {
            Ok(stepped) => stepped,
            Err(error) => return Err(keep_failed(&rank, folder, step, error)),
        };
        clock.add(&stepped);
        let last = step == plan.train.steps as u64;
        let due = |every: usize| last || (every > 0 && step.is_multiple_of(every as u64));

        if due(plan.train.log_every) || step == done + 1 {
            let view = lookout.look(&rank, clock.times(), step > done + 1)?;
            let report = clock.report(step, &stepped, &view, rank.carried.left_out);
            if let Some(log) = &mut log {
                log.write(&report)?;
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
                log.write(&report)?;
                tell(Event::Evaluated(&report));
            }
        }
        let stop = asked(run)?;
        if stop || due(plan.checkpoint.every) {
            let snapshot = rank.snapshot()?;
            let saved = alone(group, || {
                let snapshot = snapshot.expect("the first rank has it");
                let path = snapshot.save(plan, folder, step)?;
                lockstep_ckpt::prune(folder, plan.checkpoint.keep)?;
                Ok::<_, Error>(path)
            })?;
            if let Some(path) = saved {
                tell(Event::Saved(&path));
            }
        }
        if stop && !last {
            return Ok(Finished { rank, stopped: Some(step) });
        }
    }
    Ok(Finished { rank, stopped: None })
}

/// Whether any rank has been asked to stop.
fn asked(run: &Run<'_>) -> Result<bool, Error> {
    let mut asked = [i64::from((run.stop)())];
    run.group.all_reduce(&mut asked, Op::Max)?;
    Ok(asked[0] > 0)
}

/// The rank's state before its first step, and how many steps are done.
pub(crate) fn build<'a>(run: &Run<'a>, device: Device) -> Result<(Rank<'a>, u64), Error> {
    let Some(start) = &run.start else { return Ok((Rank::new(run.plan, run.group, device)?, 0)) };
    let checkpoint = lockstep_ckpt::load(&start.checkpoint)?;
    let here = &run.plan.model;
    let differences = differences(&checkpoint.head().shape, here);
    if !differences.is_empty() {
        return Err(Error::Mistake(format!(
            "{} holds another model than the run file describes: {}; say in [model] what is there",
            start.checkpoint.display(),
            differences.join(", ")
        )));
    }
    if start.resume {
        let rank = Rank::resume(run.plan, run.group, device, &checkpoint)?;
        return Ok((rank, checkpoint.head().step));
    }
    let (part, zero) = (run.plan.part(run.group.rank()), run.plan.layout.zero);
    let weights = load_weights(&device, &part, dtype(run.plan), zero, checkpoint.params());
    Ok((Rank::with_weights(run.plan, run.group, device, weights)?, 0))
}

/// Where the model of a checkpoint is another one. How much is dropped and what routers are made to do are
/// matters of the training, and may change.
fn differences(there: &Shape, here: &Shape) -> Vec<String> {
    let weights_of = |shape: &Shape| {
        let moe = shape.moe.map(|moe| Moe {
            capacity: None,
            aux_loss: 0.0,
            z_loss: 0.0,
            balance: Balance::Sequence,
            ..moe
        });
        let fields = serde_json::to_value(Shape { dropout: 0.0, moe, ..shape.clone() });
        fields.ok().and_then(|fields| fields.as_object().cloned()).unwrap_or_default()
    };
    let (there, here) = (weights_of(there), weights_of(here));
    let other = |(key, value): &(&String, &Value)| here.get(*key) != Some(*value);
    let told = |(key, value)| format!("{key} is {value} there and {} here", here[key]);
    there.iter().filter(other).map(told).collect()
}

/// Saves the state before a step that came out as no number, which is still what it was: so the step can be done
/// again at once (see `replay`), and not only after all steps since the last checkpoint. It lies apart, in
/// `RUN/failed`: nobody wants to go on from it unseen. Gives the error back.
fn keep_failed(rank: &Rank<'_>, folder: &Path, step: u64, error: Error) -> Error {
    if !matches!(error, Error::NotFinite { .. }) {
        return error;
    }
    let kept = rank.snapshot().and_then(|snapshot| {
        alone(rank.group, || {
            let failed = failed(folder);
            // One is enough: that of an earlier failure goes.
            let gone = if failed.exists() { std::fs::remove_dir_all(&failed) } else { Ok(()) };
            gone.map_err(|cause| Error::Folder { path: failed.clone(), cause })?;
            snapshot.expect("the first rank has it").save(rank.plan, &failed, step - 1)
        })
    });
    if let Err(trouble) = kept {
        tracing::warn!("the state before step {step} could not be saved: {trouble}");
    }
    error
}

/// Where the state before a step that failed lies, as in a run folder of its own.
pub fn failed(run: &Path) -> PathBuf {
    run.join("failed")
}

/// The files that a run writes as it goes.
struct Log {
    metrics: Metrics,
    board: TensorBoard,
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

    fn add(&mut self, stepped: &Stepped) {
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

    fn report(&mut self, step: u64, stepped: &Stepped, view: &View, left_out: u64) -> StepReport {
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
            more: more(stepped, view, left_out),
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
fn more(stepped: &Stepped, view: &View, left_out: u64) -> BTreeMap<String, Value> {
    let computing = || view.times.iter().map(|times| times.computing);
    let mut more = vec![
        ("comm_bytes", stepped.sent.into()),
        ("compute_s", median(computing()).into()),
        ("compute_s_most", computing().fold(0.0, f64::max).into()),
        ("corrupt_samples", left_out.into()),
    ];
    more.extend(view.slow.as_ref().map(Slow::metric));
    more.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}
