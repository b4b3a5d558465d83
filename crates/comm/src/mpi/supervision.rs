//! Supervision of an MPI operation: decides when to give up, and turns errors into those of the caller.
//! Does not call MPI.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::health::board::RankState;
use crate::health::watch::{SpinPolicy, Watch};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// A rank that has left keeps its library running until all have left, so its messages still arrive.
/// A message that has not arrived after this time was never sent.
const GRACE: Duration = Duration::from_secs(1);

pub(super) enum Supervision<'a> {
    /// A call of a group.
    Call {
        watch: &'a Watch,
        /// World ranks of the participants.
        peers: &'a [usize],
        /// When one of them was first seen to have left.
        peer_left: Cell<Option<Instant>>,
    },
    /// A world that is starting and has no board yet.
    Joining { rank: usize, deadline: Instant },
}

impl<'a> Supervision<'a> {
    pub(super) fn call(watch: &'a Watch, peers: &'a [usize]) -> Supervision<'a> {
        Supervision::Call { watch, peers, peer_left: Cell::new(None) }
    }

    pub(super) fn spin_policy(&self) -> SpinPolicy {
        match self {
            Supervision::Call { watch, .. } => watch.spin,
            Supervision::Joining { .. } => SpinPolicy::BACKGROUND,
        }
    }

    /// Fails if the operation should be given up.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Supervision::Call { watch, peers, peer_left } => {
                let peer = awaited(watch, peers);
                watch.waiting_for(Some(peer));
                watch.check(peer)?;
                if !gone(watch, peer) {
                    return Ok(());
                }
                let since = peer_left.get().unwrap_or_else(Instant::now);
                peer_left.set(Some(since));
                if since.elapsed() < GRACE { Ok(()) } else { Err(watch.peer_left(peer)) }
            }
            Supervision::Joining { rank, deadline } if Instant::now() > *deadline => {
                let what = "not all ranks joined over MPI before the deadline".to_string();
                Err(Error::Join { rank: *rank, what })
            }
            Supervision::Joining { .. } => Ok(()),
        }
    }

    /// The error for an error text of the library.
    pub(super) fn failed(&self, what: String) -> Error {
        match self {
            Supervision::Call { watch, .. } => {
                let text = format!(
                    "rank {} failed in {} of group {}: {what}",
                    watch.rank, watch.call, watch.group_name
                );
                watch.raise(None, Failure { culprit: watch.rank, cause: Cause::Failed, text })
            }
            Supervision::Joining { rank, .. } => Error::Join { rank: *rank, what },
        }
    }
}

impl Drop for Supervision<'_> {
    fn drop(&mut self) {
        if let Supervision::Call { watch, .. } = self {
            watch.waiting_for(None);
        }
    }
}

/// The peer that we probably wait for: one that has left, or one that the board does not show in this call,
/// or any. MPI does not report it.
fn awaited(watch: &Watch, peers: &[usize]) -> usize {
    let words = watch.call.words();
    let here = |r: &usize| watch.board.active_calls(*r).iter().any(|a| a.words == words);
    let mut others = peers.iter().copied().filter(|r| *r != watch.rank);
    let any = others.clone().next().unwrap_or(watch.rank);
    let absent = others.clone().find(|r| !here(r));
    others.find(|r| gone(watch, *r)).or(absent).unwrap_or(any)
}

fn gone(watch: &Watch, peer: usize) -> bool {
    matches!(watch.board.state(peer), RankState::Left | RankState::Failed)
}
