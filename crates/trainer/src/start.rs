//! Where a run starts: at random, from weights, or where it was. The newest checkpoint that all ranks find good is
//! taken; each reads and checks what it needs of it, and all agree. Never mixes two checkpoints.

use std::path::{Path, PathBuf};

use lockstep_ckpt::Checkpoint;
use lockstep_comm::Group;
use lockstep_data::Source;
use lockstep_plan::Plan;
use lockstep_plan::model::{Balance, Moe, Shape};
use lockstep_plan::reduction::ReductionPolicy;
use serde_json::Value;

use crate::agree::first_error;
use crate::rank::dtype;
use crate::run::{Event, Run};
use crate::snapshot::load_weights;
use crate::{Error, Rank};

/// Where a run starts when not at random.
#[derive(Clone, Debug)]
pub struct Start {
    /// A checkpoint, or a run, of which the newest good one is taken.
    pub checkpoint: PathBuf,
    /// Whether to go on with its step and moments.
    pub resume: bool,
}

/// The rank's state before its first step, and how many steps are done. All ranks call it.
pub fn build<'a>(run: &Run<'a>, tell: &mut dyn FnMut(Event<'_>)) -> Result<(Rank<'a>, u64), Error> {
    let Some(start) = &run.start else {
        return Ok((Rank::new(run.plan, run.group, run.device.clone())?, 0));
    };
    let candidates = candidates(run.group, &start.checkpoint)?;
    let mut newest = None;
    for dir in candidates {
        match attempt(run, &dir, start.resume)? {
            Ok(built) => return Ok(built),
            Err((rank, what)) => {
                if run.group.rank() == 0 {
                    tell(Event::SkippedCheckpoint { path: &dir, rank, what: &what });
                }
                newest.get_or_insert(Error::Elsewhere { rank, what });
            }
        }
    }
    let path = start.checkpoint.clone();
    Err(newest.unwrap_or(Error::Checkpoint(lockstep_ckpt::Error::NotFound { path })))
}

/// Checkpoints to try, the newest first, as the first rank sees them: all try the same.
fn candidates(group: &Group, path: &Path) -> Result<Vec<PathBuf>, Error> {
    let named = lockstep_ckpt::is_checkpoint(path);
    let mut steps: Vec<i64> = match named {
        // It was named, and nothing else is meant.
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

/// A rank with the state of one checkpoint, and its step; or which rank found what to be wrong with it.
type Attempt<'a> = Result<(Rank<'a>, u64), (usize, String)>;

fn attempt<'a>(run: &Run<'a>, dir: &Path, resume: bool) -> Result<Attempt<'a>, Error> {
    let (plan, group, device) = (run.plan, run.group, &run.device);
    let opened = lockstep_ckpt::load(dir);
    if let Ok(checkpoint) = &opened {
        same_model(checkpoint, plan)?;
    }
    let loaded = opened.map_err(Error::from).and_then(|checkpoint| {
        let (part, gather) = (plan.part(group.rank()), ReductionPolicy::of(plan).gather);
        let weights = load_weights(device, &part, dtype(plan), gather, &checkpoint.params())?;
        Ok((checkpoint, weights))
    });
    let trouble = loaded.as_ref().err().map(Error::to_string);
    let (checkpoint, weights) = match (loaded, first_error(group, trouble)?) {
        (Ok(loaded), None) => loaded,
        (Err(error), None) => return Err(error),
        (_, Some(trouble)) => return Ok(Err(trouble)),
    };
    let mut rank = Rank::with_weights(plan, group, device.clone(), weights)?;
    if !resume {
        return Ok(Ok((rank, 0)));
    }
    let loaded = rank.load_states(&checkpoint);
    if let Some(trouble) = first_error(group, loaded.err().map(|error| error.to_string()))? {
        return Ok(Err(trouble));
    }
    rank.extra = checkpoint.head().extra.clone();
    if group.rank() == 0 {
        same_course(&checkpoint, plan, run.source);
    }
    Ok(Ok((rank, checkpoint.head().step)))
}

fn same_model(checkpoint: &Checkpoint, plan: &Plan) -> Result<(), Error> {
    let differences = differences(&checkpoint.head().shape, &plan.model);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(Error::Mistake(format!(
            "{} holds another model than the run file describes: {}; say in [model] what is there",
            checkpoint.dir().display(),
            differences.join(", ")
        ))),
    }
}

/// What goes on otherwise than it began is allowed, but not in silence.
fn same_course(checkpoint: &Checkpoint, plan: &Plan, source: &Source) {
    let head = checkpoint.head();
    let (there, here) = (&head.position, position(plan, source, head.step));
    if there.samples != here.samples {
        tracing::warn!(
            "train.global_batch is another than it was: the checkpoint had used {} samples, and step {} would have \
             used {} of this size; some come twice or never",
            there.samples,
            head.step,
            here.samples
        );
    }
    if there.seed != here.seed {
        tracing::warn!(
            "train.seed is {} and was {}: samples and dropout are drawn anew",
            here.seed,
            there.seed
        );
    }
    if there.data != here.data {
        tracing::warn!(
            "the data is not what the run began with: {} instead of {}",
            here.data,
            there.data
        );
    }
}

/// Where in the data a training is after `step` steps: a number, the same for any layout.
pub(crate) fn position(plan: &Plan, source: &Source, step: u64) -> lockstep_ckpt::Position {
    lockstep_ckpt::Position {
        samples: step * plan.train.global_batch as u64,
        seed: plan.train.seed,
        data: source.identity(),
    }
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
