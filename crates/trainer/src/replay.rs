//! One step of a run once more, to tell data from machines: a step is a function of its state and its samples, so
//! what comes out twice the same is in one of these, and what does not is in a machine. Writes nothing.

use crate::{Divergence, Error, Run, StepResult, build};

/// What came of it: the same on all ranks, but for the times of a step.
#[derive(Clone, Debug)]
pub struct Replayed {
    /// The step, or where it went wrong.
    pub outcome: Outcome,
    /// Where the second time differed from the first.
    pub parting: Option<Divergence>,
    /// Samples of the global batch whose loss is not finite.
    pub samples: Vec<usize>,
}

#[derive(Clone, Debug)]
pub enum Outcome {
    Finite(StepResult),
    /// On which rank, and in which layer, it began.
    NotFinite {
        rank: usize,
        place: String,
    },
}

/// Goes from where `run` starts to the state before `step` and does the step's passes twice, then the step. `tell`
/// hears of the steps on the way. All ranks call it.
pub fn replay(run: &Run<'_>, step: u64, mut tell: impl FnMut(u64)) -> Result<Replayed, Error> {
    let (mut rank, done) = build(run, &mut |_| {})?;
    if step <= done {
        return Err(Error::Mistake(format!(
            "step {step} cannot be replayed from a state after step {done}"
        )));
    }
    for before in done + 1..step {
        tell(before);
        rank.step(run.source, before)?;
    }
    tell(step);
    let (one, other) = (rank.trace(run.source, step)?, rank.trace(run.source, step)?);
    let parting = rank.parting(&one, &other)?;
    let mut samples = rank.bad_samples(&one)?;
    samples.extend(rank.bad_samples(&other)?);
    samples.sort_unstable();
    samples.dedup();
    let outcome = match rank.step(run.source, step) {
        Ok(stepped) => Outcome::Finite(stepped),
        Err(Error::NotFinite { rank, place, .. }) => Outcome::NotFinite { rank, place },
        Err(error) => return Err(error),
    };
    Ok(Replayed { outcome, parting, samples })
}
