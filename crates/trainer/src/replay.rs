//! Replays one step of a run twice. A step is a deterministic function of its state and samples: if both replays fail
//! in the same way, the state or the data is the cause; if they differ, a machine is. Writes nothing.

use crate::{Divergence, Error, Run, StepResult, build};

/// Result of a replay; the same on all ranks except for the times of the step.
#[derive(Clone, Debug)]
pub struct Replayed {
    pub outcome: Outcome,
    /// First difference between the two replays.
    pub divergence: Option<Divergence>,
    /// Samples of the global batch whose loss is not finite.
    pub samples: Vec<usize>,
}

#[derive(Clone, Debug)]
pub enum Outcome {
    Finite(StepResult),
    /// Rank and layer of the first value that is not finite.
    NotFinite {
        rank: usize,
        place: String,
    },
}

/// Trains from the start of `run` to the state before `step`, runs forward and backward of `step` twice, then takes the
/// step. Calls `on_step` before each step. Collective.
pub fn replay(run: &Run<'_>, step: u64, mut on_step: impl FnMut(u64)) -> Result<Replayed, Error> {
    let (mut rank, done) = build(run, &mut |_| {})?;
    if step <= done {
        return Err(Error::Invalid(format!(
            "cannot replay step {step} from a checkpoint after step {done}; choose an earlier checkpoint"
        )));
    }
    for before in done + 1..step {
        on_step(before);
        rank.step(run.source, before)?;
    }
    on_step(step);
    let first = rank.step_checksums(run.source, step)?;
    let second = rank.step_checksums(run.source, step)?;
    let divergence = rank.divergence(&first, &second)?;
    let mut samples = rank.bad_samples(&first)?;
    samples.extend(rank.bad_samples(&second)?);
    samples.sort_unstable();
    samples.dedup();
    let outcome = match rank.step(run.source, step) {
        Ok(stepped) => Outcome::Finite(stepped),
        Err(Error::NotFinite { rank, place, .. }) => Outcome::NotFinite { rank, place },
        Err(error) => return Err(error),
    };
    Ok(Replayed { outcome, divergence, samples })
}
