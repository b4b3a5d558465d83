//! A run: data, training, reports, checkpoints and the final model, in a run folder. Prints nothing.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lockstep_comm::{Group, Op, shard_range};
use lockstep_events::{Metrics, StepReport, TensorBoard};
use lockstep_kernels::Team;
use serde_json::Value;

use crate::checkpoint::{Checkpoint, State};
use crate::collective::all_succeed;
use crate::config::Config;
use crate::data::{self, Reader, SpillTo};
use crate::error::{Error, Result};
use crate::matrix::{Cache, Cuts, Matrix};
use crate::model::Model;
use crate::train::{Booster, EvalSet, Evaluation, Progress, fit};

/// A run on one rank.
pub struct Run<'a> {
    pub group: &'a Group,
    pub team: &'a Team,
    pub config: &'a Config,
    pub folder: &'a Path,
    /// Whether to continue from the newest checkpoint, if there is one.
    pub resume: bool,
    /// Number of the start of the ranks; later ones may write checkpoints.
    pub generation: u64,
    /// Whether this rank was asked to stop.
    pub stop: &'a dyn Fn() -> bool,
}

/// Something to report. Only rank 0 gets events.
pub enum Event<'a> {
    /// The data is ready.
    Data {
        matrix: &'a Matrix,
        cached: bool,
        seconds: f64,
    },
    /// Training continues after a checkpoint.
    Resumed {
        round: usize,
    },
    /// A checkpoint could not be read; an older one is used.
    Skipped {
        what: String,
    },
    /// A round that is reported.
    Round {
        progress: &'a Progress,
        report: &'a StepReport,
    },
    Saved {
        path: PathBuf,
    },
    /// A checkpoint was not saved. Training continues.
    SaveFailed {
        round: usize,
        what: String,
    },
}

/// The end of a run.
pub struct Finished {
    pub model: Model,
    pub progress: Progress,
    /// Whether the run was stopped before its last round. It can be resumed.
    pub stopped: bool,
    /// Bytes that this rank sent during training.
    pub sent_bytes: u64,
    pub seconds: f64,
}

/// Trains and writes `model.json`, `model.ubj`, `metrics.jsonl`, `tensorboard/`, `binned/` and `checkpoints/` into the
/// folder. Collective.
pub fn run(run: &Run<'_>, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Finished> {
    let (group, params) = (run.group, &run.config.trees);
    let started = Instant::now();
    let first = group.rank() == 0;
    let (matrix, cached) = load_train(run)?;
    let mut sets = load_eval(run, &matrix)?;
    let seconds = started.elapsed().as_secs_f64();
    if first {
        on_event(Event::Data { matrix: &matrix, cached, seconds });
    }
    let digest = digest(run.config, &matrix.cuts);
    let (checkpoint, problems) = newest(run)?;
    if first {
        problems.into_iter().for_each(|what| on_event(Event::Skipped { what }));
    }
    let (mut booster, progress) = match checkpoint {
        Some(Checkpoint { state, model }) => {
            if state.digest != digest {
                return Err(Error::Input(
                    "the checkpoint was written with other parameters or other data; start without --resume".into(),
                ));
            }
            if first {
                on_event(Event::Resumed { round: state.progress.round });
            }
            (Booster::resume(group, run.team, &matrix, params, model)?, state.progress)
        }
        None => (Booster::new(group, run.team, &matrix, params)?, Progress::default()),
    };
    let mut reports = Reports::open(run, &progress)?;
    let mut evaluation = Evaluation {
        sets: &mut sets,
        train: run.config.run.eval_train,
        every: run.config.run.eval_every,
    };
    let sent = group.traffic().bytes;
    let mut stopped = false;
    let options = &run.config.run;
    let save = |progress: &Progress, model: &Model| {
        let state = State {
            progress: progress.clone(),
            generation: run.generation,
            digest: digest.clone(),
        };
        Checkpoint { state, model: model.clone() }.save(run.folder, options.keep)
    };
    let mut after_round = |progress: &Progress, booster: &Booster<'_>| {
        let last = progress.is_over(params);
        let mut flag = [i64::from((run.stop)())];
        group.all_reduce(&mut flag, Op::Max)?;
        stopped = flag[0] > 0 && !last;
        let due =
            options.checkpoint_every > 0 && progress.round.is_multiple_of(options.checkpoint_every);
        if first {
            let report =
                last || stopped || progress.round.is_multiple_of(options.report_every.max(1));
            reports.write(progress, params.rounds, group.traffic().bytes - sent, |step| {
                if report {
                    on_event(Event::Round { progress, report: step });
                }
            })?;
            if due || stopped || last {
                match save(progress, booster.model()) {
                    Ok(path) => on_event(Event::Saved { path }),
                    Err(error @ Error::Checkpoint(lockstep_ckpt::Error::Fenced { .. })) => {
                        return Err(error);
                    }
                    // Without a checkpoint, a stopped run would lose its rounds.
                    Err(error) if stopped => return Err(error),
                    Err(error) => on_event(Event::SaveFailed {
                        round: progress.round,
                        what: error.to_string(),
                    }),
                }
            }
        }
        Ok(if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let progress = fit(
        group,
        run.team,
        &mut booster,
        (params, &mut evaluation),
        (progress, &mut after_round),
    )?;
    let model = booster.into_model();
    let written = match first && !stopped {
        true => model
            .save(&run.folder.join("model.json"))
            .and_then(|()| model.save(&run.folder.join("model.ubj"))),
        false => Ok(()),
    };
    all_succeed(group, written)?;
    Ok(Finished {
        model,
        progress,
        stopped,
        sent_bytes: group.traffic().bytes - sent,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// The checkpoint to continue from, the same on all ranks: rank 0 chooses it.
fn newest(run: &Run<'_>) -> Result<(Option<Checkpoint>, Vec<String>)> {
    if !run.resume {
        return Ok((None, Vec::new()));
    }
    let found = match run.group.rank() {
        0 => Checkpoint::newest(run.folder),
        _ => Ok((None, Vec::new())),
    };
    let (mine, problems) = all_succeed(run.group, found)?;
    let mut bytes = match &mine {
        Some(checkpoint) => {
            let state = serde_json::to_vec(&checkpoint.state).expect("plain data");
            let mut bytes = (state.len() as u64).to_le_bytes().to_vec();
            bytes.extend(state);
            bytes.extend(checkpoint.model.to_bytes(crate::model::ModelFormat::Ubj));
            bytes
        }
        None => Vec::new(),
    };
    let mut len = [bytes.len() as i64];
    run.group.broadcast(&mut len, 0)?;
    if len[0] == 0 {
        return Ok((None, problems));
    }
    bytes.resize(len[0] as usize, 0);
    run.group.broadcast(&mut bytes, 0)?;
    let wrong = || Error::Input("rank 0 sent an invalid checkpoint".into());
    let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(wrong)?;
    let (state, model) =
        rest.split_at_checked(u64::from_le_bytes(*len) as usize).ok_or_else(wrong)?;
    let state = serde_json::from_slice(state).map_err(|_| wrong())?;
    Ok((Some(Checkpoint { state, model: Model::from_bytes(model)? }), problems))
}

/// Digest of everything that a tree depends on.
fn digest(config: &Config, cuts: &Cuts) -> String {
    let mut params = config.trees.clone();
    // More rounds continue the same training.
    (params.rounds, params.early_stopping, params.metrics) = (0, 0, Vec::new());
    let text = serde_json::to_string(&(params, cuts)).expect("plain data");
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// The training data: from the file of an earlier start, or read and binned.
fn load_train(run: &Run<'_>) -> Result<(Matrix, bool)> {
    let (group, config) = (run.group, run.config);
    let max_bin = config.trees.max_bin;
    if let Some(generate) = &config.data.generate {
        let table = generate.table(shard_range(generate.rows, group.size(), group.rank()));
        return Ok((Matrix::new(group, &table, None, max_bin, run.team)?, false));
    }
    let path = config.data.train.as_deref().expect("the configuration was checked");
    let name = format!("train-{}-of-{}.bins", group.rank(), group.size());
    let cache = Cache {
        path: run.folder.join("binned").join(name),
        identity: all_succeed(group, identity(path, config))?,
        ranks: group.size(),
    };
    let found = cache.load();
    let mut all = [i64::from(found.is_some())];
    group.all_reduce(&mut all, Op::Min)?;
    if let Some(matrix) = found.filter(|_| all[0] > 0) {
        return Ok((matrix, true));
    }
    let schema = config.data.schema();
    let spill = run.folder.join("binned");
    let reader = Reader {
        schema: &schema,
        format: config.data.format,
        labeled: true,
        team: run.team,
        spill: Some(SpillTo { folder: &spill, above: data::available_memory() / 2 }),
        categories: None,
    };
    let table = data::read(group, path, &reader)?;
    let matrix = Matrix::new(group, &table, None, max_bin, run.team)?;
    drop(table);
    Ok((all_succeed(group, cache.save(matrix))?, false))
}

/// Everything that binned data depends on.
fn identity(path: &Path, config: &Config) -> Result<String> {
    use std::os::unix::fs::MetadataExt as _;
    let full = path.canonicalize().map_err(Error::system("open", path))?;
    let meta = full.metadata().map_err(Error::system("open", path))?;
    let (seconds, nanos) = (meta.mtime(), meta.mtime_nsec());
    let data = serde_json::to_string(&config.data).expect("plain data");
    Ok(format!(
        "{} {} {seconds}.{nanos} {data} {}",
        full.display(),
        meta.len(),
        config.trees.max_bin
    ))
}

fn load_eval(run: &Run<'_>, train: &Matrix) -> Result<Vec<EvalSet>> {
    let (group, config) = (run.group, run.config);
    let bin = |table: &data::Table| {
        Matrix::new(group, table, Some(&train.cuts), config.trees.max_bin, run.team)
    };
    if let Some(generate) = config.data.generate.filter(|generate| generate.eval_rows > 0) {
        let rows = shard_range(generate.eval_rows, group.size(), group.rank());
        let table = generate.table(generate.rows + rows.start..generate.rows + rows.end);
        return Ok(vec![EvalSet::new("valid", bin(&table)?)]);
    }
    let mut schema = config.data.schema();
    schema.features = schema.features.or(Some(train.features.len()));
    let categories = train
        .features
        .iter()
        .filter_map(|feature| Some((feature.name.clone(), feature.categories.clone()?)));
    let categories = categories.collect();
    let reader = Reader {
        schema: &schema,
        format: config.data.format,
        labeled: true,
        team: run.team,
        spill: None,
        categories: Some(&categories),
    };
    let mut sets = Vec::new();
    for (name, path) in &config.data.eval {
        let table = data::read(group, path, &reader)?;
        let names = train.features.iter().map(|feature| &feature.name);
        if !table.names.iter().eq(names) {
            return Err(Error::file(path, "its features differ from those of the training data"));
        }
        sets.push(EvalSet::new(name, bin(&table)?));
    }
    Ok(sets)
}

/// Files with the metrics of each round, on rank 0.
struct Reports {
    files: Option<(Metrics, TensorBoard)>,
    started: Instant,
    first_round: usize,
}

impl Reports {
    fn open(run: &Run<'_>, progress: &Progress) -> Result<Reports> {
        let open = || -> std::io::Result<(Metrics, TensorBoard)> {
            let round = progress.round as u64;
            let metrics = Metrics::open_after(&run.folder.join("metrics.jsonl"), round)?;
            Ok((metrics, TensorBoard::create_after(&run.folder.join("tensorboard"), round)?))
        };
        let files = match run.group.rank() {
            0 => open().map(Some).map_err(Error::system("write", run.folder)),
            _ => Ok(None),
        };
        let files = all_succeed(run.group, files)?;
        Ok(Reports { files, started: Instant::now(), first_round: progress.round })
    }

    fn write(
        &mut self,
        progress: &Progress,
        rounds: usize,
        sent: u64,
        report: impl FnOnce(&StepReport),
    ) -> Result<()> {
        let elapsed = self.started.elapsed();
        let done = progress.round - self.first_round;
        let left =
            elapsed.mul_f64((rounds - progress.round.min(rounds)) as f64 / done.max(1) as f64);
        let mut step = StepReport {
            elapsed_s: Some(elapsed.as_secs_f64()),
            mem_bytes: peak_memory(),
            eta: (progress.round < rounds).then_some(left.max(Duration::from_millis(1))),
            ..StepReport::of(progress.round, rounds)
        };
        for (name, value) in &progress.metrics {
            step.more.insert(name.clone(), Value::from(*value));
        }
        step.more.insert("sent_bytes".into(), Value::from(sent));
        if let Some((metrics, board)) = &mut self.files {
            let written = metrics.write(&step).and_then(|()| board.write(&step));
            written.map_err(Error::system("write", Path::new("metrics.jsonl")))?;
        }
        report(&step);
        Ok(())
    }
}

/// Peak memory of this process, if the system tells.
fn peak_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}
