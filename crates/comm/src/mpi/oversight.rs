//! For whom an MPI operation is waited for: says when to give up, and puts what goes wrong into the
//! words of that user. Never touches MPI.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::health::board::State;
use crate::health::watch::{Patience, Watch};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// A rank that has left keeps its library moving until all have left, so what it sent still comes;
/// whatever has not come after this long was never sent.
const GRACE: Duration = Duration::from_secs(1);

pub(super) enum Oversight<'a> {
    /// A call of a group.
    Call {
        watch: &'a Watch,
        /// World ranks that take part.
        peers: &'a [usize],
        /// Since when one of them is known to have left.
        deserted: Cell<Option<Instant>>,
    },
    /// A world that is forming, without a board yet.
    Joining { rank: usize, deadline: Instant },
}

impl<'a> Oversight<'a> {
    pub(super) fn call(watch: &'a Watch, peers: &'a [usize]) -> Oversight<'a> {
        Oversight::Call { watch, peers, deserted: Cell::new(None) }
    }

    pub(super) fn patience(&self) -> Patience {
        match self {
            Oversight::Call { watch, .. } => watch.patience,
            Oversight::Joining { .. } => Patience::BACKGROUND,
        }
    }

    /// An error if it is time to give up.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Oversight::Call { watch, peers, deserted } => {
                let peer = awaited(watch, peers);
                watch.waiting_for(Some(peer));
                watch.check(peer)?;
                if !gone(watch, peer) {
                    return Ok(());
                }
                let since = deserted.get().unwrap_or_else(Instant::now);
                deserted.set(Some(since));
                if since.elapsed() < GRACE { Ok(()) } else { Err(watch.deserted(peer)) }
            }
            Oversight::Joining { rank, deadline } if Instant::now() > *deadline => {
                let what = "not all ranks answered over MPI before the deadline".to_string();
                Err(Error::Join { rank: *rank, what })
            }
            Oversight::Joining { .. } => Ok(()),
        }
    }

    /// The error for what the library said.
    pub(super) fn failed(&self, what: String) -> Error {
        match self {
            Oversight::Call { watch, .. } => {
                let text = format!(
                    "rank {} failed in {} of group {}: {what}",
                    watch.rank, watch.call, watch.group_name
                );
                watch.raise(None, Failure { guilty: watch.rank, cause: Cause::Failed, text })
            }
            Oversight::Joining { rank, .. } => Error::Join { rank: *rank, what },
        }
    }
}

impl Drop for Oversight<'_> {
    fn drop(&mut self) {
        if let Oversight::Call { watch, .. } = self {
            watch.waiting_for(None);
        }
    }
}

/// The peer that probably keeps us waiting: one that has left, or one that the board does not show in
/// this call, or any. MPI itself does not tell.
fn awaited(watch: &Watch, peers: &[usize]) -> usize {
    let words = watch.call.words();
    let here = |r: &usize| watch.board.doing(*r).iter().any(|d| d.words == words);
    let mut others = peers.iter().copied().filter(|r| *r != watch.rank);
    let any = others.clone().next().unwrap_or(watch.rank);
    let absent = others.clone().find(|r| !here(r));
    others.find(|r| gone(watch, *r)).or(absent).unwrap_or(any)
}

fn gone(watch: &Watch, peer: usize) -> bool {
    matches!(watch.board.state(peer), State::Left | State::Failed)
}
