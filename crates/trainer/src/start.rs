//! Initial state of a run: random parameters, the weights of a checkpoint, or a resumed checkpoint. Uses the newest
//! checkpoint that all ranks can load; each rank reads and verifies only its shards. Never mixes two checkpoints.

use std::path::{Path, PathBuf};

use lockstep_ckpt::Checkpoint;
use lockstep_comm::{Group, Op};
use lockstep_data::Source;
use lockstep_plan::Plan;
use lockstep_plan::model::{Balance, Moe, Shape};
use serde_json::Value;

use crate::agree::first_error;
use crate::from_plan::storage;
use crate::run::{Event, Run};
use crate::snapshot::load_weights;
use crate::{Error, Rank};

/// Checkpoint that a run starts from.
#[derive(Clone, Debug)]
pub struct Start {
    /// A checkpoint, or a run folder, of which the newest intact checkpoint is used.
    pub checkpoint: PathBuf,
    /// Continue with its step and optimizer state instead of loading only the weights.
    pub resume: bool,
}

/// Builds the state of a rank before its first step. Returns it with the number of steps already done. Collective.
pub fn build<'a>(
    run: &Run<'a>,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<(Rank<'a>, u64), Error> {
    let Some(start) = &run.start else {
        return Ok((Rank::new(run.plan, run.group, run.device.clone())?, 0));
    };
    let candidates = candidates(run.group, &start.checkpoint)?;
    let (mut newest, mut retryable) = (None, false);
    for dir in &candidates {
        match attempt(run, dir, start.resume)? {
            Ok(built) => {
                if run.group.rank() == 0 {
                    on_event(Event::Loaded { path: dir, resume: start.resume });
                }
                return Ok(built);
            }
            Err(LoadFailure { rank, what, retryable: may_pass }) => {
                if run.group.rank() == 0 {
                    on_event(Event::SkippedCheckpoint { path: dir, rank, what: &what });
                }
                retryable |= may_pass;
                newest.get_or_insert((rank, what));
            }
        }
    }
    let path = start.checkpoint.clone();
    Err(match newest {
        None => Error::Checkpoint(lockstep_ckpt::Error::NotFound { path }),
        Some((rank, what)) if retryable => Error::OtherRank { rank, what },
        Some((rank, what)) => Error::Invalid(format!(
            "no checkpoint in {} can be loaded ({} tried); the newest: rank {rank}: {what}{}",
            path.display(),
            candidates.len(),
            match start.resume {
                true => ". To start over, omit --resume, which renames this run",
                false => "",
            }
        )),
    })
}

/// Checkpoints to try, newest first, as listed by rank 0.
fn candidates(group: &Group, path: &Path) -> Result<Vec<PathBuf>, Error> {
    let named = lockstep_ckpt::is_checkpoint(path);
    let mut steps: Vec<i64> = match named {
        // A single checkpoint was requested; others are not tried.
        true => vec![],
        false => lockstep_ckpt::steps(path).into_iter().map(|step| step as i64).collect(),
    };
    let mut count = [if named { -1 } else { steps.len() as i64 }];
    group.broadcast(&mut count, 0)?;
    if count[0] < 0 {
        return Ok(vec![path.to_path_buf()]);
    }
    steps.resize(count[0] as usize, 0);
    group.broadcast(&mut steps, 0)?;
    Ok(steps.into_iter().map(|step| lockstep_ckpt::folder(path, step as u64)).collect())
}

/// A rank with the state and step of a checkpoint.
type Attempt<'a> = Result<(Rank<'a>, u64), LoadFailure>;

/// The rank that could not load a checkpoint, and its error.
struct LoadFailure {
    rank: usize,
    what: String,
    /// A rank could not read a file, which may work later. Corrupt or missing files stay as they are.
    retryable: bool,
}

/// The failure of the lowest rank that has one, on all ranks. Collective.
fn first_failure(group: &Group, mine: Option<&Error>) -> Result<Option<LoadFailure>, Error> {
    let Some((rank, what)) = first_error(group, mine.map(Error::to_string))? else {
        return Ok(None);
    };
    let may_pass = matches!(mine, Some(Error::Checkpoint(lockstep_ckpt::Error::System { source, .. }))
        if source.kind() != std::io::ErrorKind::NotFound);
    let mut retryable = [i64::from(may_pass)];
    group.all_reduce(&mut retryable, Op::Max)?;
    Ok(Some(LoadFailure { rank, what, retryable: retryable[0] > 0 }))
}

fn attempt<'a>(run: &Run<'a>, dir: &Path, resume: bool) -> Result<Attempt<'a>, Error> {
    let (plan, group, device) = (run.plan, run.group, &run.device);
    let opened = lockstep_ckpt::load(dir);
    if let Ok(checkpoint) = &opened {
        check_same_model(checkpoint, plan)?;
    }
    let loaded = opened.map_err(Error::from).and_then(|checkpoint| {
        let part = plan.part(group.rank());
        let weights = load_weights(device, &part, storage(plan), &checkpoint.params())?;
        Ok((checkpoint, weights))
    });
    let failure = first_failure(group, loaded.as_ref().err())?;
    let (checkpoint, weights) = match (loaded, failure) {
        (Ok(loaded), None) => loaded,
        (Err(error), None) => return Err(error),
        (_, Some(failure)) => return Ok(Err(failure)),
    };
    let mut rank = Rank::with_weights(plan, group, device.clone(), weights)?;
    if !resume {
        return Ok(Ok((rank, 0)));
    }
    let loaded = rank.load_states(&checkpoint);
    if let Some(failure) = first_failure(group, loaded.err().as_ref())? {
        return Ok(Err(failure));
    }
    if group.rank() == 0 {
        warn_about_changes(&checkpoint, plan, run.source);
    }
    Ok(Ok((rank, checkpoint.head().step)))
}

fn check_same_model(checkpoint: &Checkpoint, plan: &Plan) -> Result<(), Error> {
    let differences = differences(&checkpoint.head().shape, &plan.model);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "{} does not match the model of the run file: {}; set [model] to the values of the checkpoint",
            checkpoint.dir().display(),
            differences.join(", ")
        ))),
    }
}

/// Warns if a resumed run uses another batch size, seed or data.
fn warn_about_changes(checkpoint: &Checkpoint, plan: &Plan, source: &Source) {
    let head = checkpoint.head();
    let (before, now) = (&head.position, position(plan, source, head.step));
    if !before.first_batch_used && head.step > 0 {
        tracing::warn!(
            "the checkpoint is from a version that skipped the first global batch: the samples of step {} are used once \
             more",
            head.step
        );
    }
    if before.samples != now.samples {
        tracing::warn!(
            "train.global_batch has changed: the checkpoint after step {} has used {} samples, {} with the new size; \
             some samples are repeated or skipped",
            head.step,
            before.samples,
            now.samples
        );
    }
    if before.seed != now.seed {
        tracing::warn!(
            "train.seed has changed from {} to {}: the order of samples and the dropout masks differ",
            before.seed,
            now.seed
        );
    }
    if before.data != now.data {
        tracing::warn!(
            "the data has changed since the checkpoint: {} instead of {}",
            now.data,
            before.data
        );
    }
}

/// Position in the data after `step` steps; independent of the layout.
pub(crate) fn position(plan: &Plan, source: &Source, step: u64) -> lockstep_ckpt::Position {
    lockstep_ckpt::Position {
        samples: step * plan.train.global_batch as u64,
        seed: plan.train.seed,
        data: source.identity(),
        first_batch_used: true,
    }
}

/// Differences between the model of a checkpoint and that of the run file. Dropout and the router's losses and capacity
/// may differ: they do not change the weights' shapes.
fn differences(checkpoint: &Shape, run_file: &Shape) -> Vec<String> {
    let fields = |shape: &Shape| {
        let moe = shape.moe.map(|moe| Moe {
            capacity: None,
            aux_loss: 0.0,
            z_loss: 0.0,
            balance: Balance::Sequence,
            ..moe
        });
        let value = serde_json::to_value(Shape { dropout: 0.0, moe, ..shape.clone() });
        value.ok().and_then(|fields| fields.as_object().cloned()).unwrap_or_default()
    };
    let (checkpoint, run_file) = (fields(checkpoint), fields(run_file));
    let differs = |(key, value): &(&String, &Value)| run_file.get(*key) != Some(*value);
    let describe = |(key, value)| {
        format!("{key} is {value} in the checkpoint and {} in the run file", run_file[key])
    };
    checkpoint.iter().filter(differs).map(describe).collect()
}
