//! The checkpoint of the last step. If it cannot be saved, the ranks keep their state and retry until it is: exiting
//! would discard every step since the previous checkpoint.

use std::time::{Duration, Instant};

use crate::run::{Run, check_fenced};
use crate::start::position;
use crate::{Error, Flags, Rank, SaveOutcome, Saver, agree};

/// Time between two attempts; it doubles after each.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

pub(crate) struct FinalSave<'r, 'a> {
    pub run: &'r Run<'a>,
    pub rank: &'r Rank<'a>,
    pub step: u64,
    pub generation: u64,
    /// The run was asked to stop: then the launcher ends the attempts. Else a request to stop ends them.
    pub stopping: bool,
}

impl FinalSave<'_, '_> {
    /// Waits for the pending checkpoint and retries it until it is saved. `report` is called with every outcome.
    /// Collective.
    pub fn complete(
        &self,
        saver: &mut Saver<'_>,
        report: &mut dyn FnMut(SaveOutcome),
    ) -> Result<(), Error> {
        let (mut pause, mut last_attempt) = (FIRST_PAUSE, false);
        loop {
            let outcome = saver.finish()?;
            check_fenced(outcome.as_ref(), self.run.folder, self.generation)?;
            let mut failed = match outcome {
                Some(SaveOutcome::Failed(failed)) => failed,
                Some(saved) => {
                    report(saved);
                    return Ok(());
                }
                None => return Ok(()),
            };
            if last_attempt {
                return Err(Error::OtherRank { rank: failed.rank, what: failed.what });
            }
            failed.retry = Some(pause);
            report(SaveOutcome::Failed(failed));
            last_attempt = self.wait(pause)? && !self.stopping;
            pause = (2 * pause).min(LONGEST_PAUSE);
            let position = position(self.run.plan, self.run.source, self.step);
            saver.begin(self.rank, self.step, position)?;
        }
    }

    /// Waits for the next attempt. Returns whether a rank was asked to stop. Collective.
    fn wait(&self, pause: Duration) -> Result<bool, Error> {
        let start = Instant::now();
        // Repeated short collectives instead of one long wait, so that a dead rank is noticed.
        let nap = pause.min(Duration::from_secs(1)).min(self.run.group.timeout() / 4);
        loop {
            std::thread::sleep(nap);
            let (stop, writing) = ((self.run.stop)(), start.elapsed() < pause);
            let flags = agree(self.run.group, Flags { stop, writing, ..Flags::default() })?;
            if !flags.writing || flags.stop && !self.stopping {
                return Ok(flags.stop);
            }
        }
    }
}
