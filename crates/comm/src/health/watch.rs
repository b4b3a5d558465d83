//! Waiting for a peer: how long to spin, when to sleep, when to give up, and with which error.
//! Every wait of this crate goes through here, so every wait has a deadline and a name.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::call::history::CallHistory;
use crate::call::{Call, Stamp};
use crate::health::blame::{StalledCall, blame};
use crate::health::board::{Board, RankState};
use crate::health::poll::SocketWait;
use crate::memory::bell::Bell;
use lockstep_types::Collective;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest sleep between two checks of the board. Bounds the time from an alarm to the error of a
/// sleeping rank.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How long the notice of a failure, or data from a rank that has left, may take to arrive before we
/// decide without it.
const GRACE: Duration = Duration::from_secs(3);

/// How a waiting thread polls before it sleeps in the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinPolicy {
    /// Polls with a pause instruction between them.
    pub spins: u32,
    /// Polls with a yield of the processor between them.
    pub yields: u32,
}

impl SpinPolicy {
    /// Spinning pays only if every rank of the host has its own core. With more ranks than cores the peer
    /// may need this core: yield a few times, then sleep.
    pub(crate) fn for_ranks(local_ranks: usize) -> SpinPolicy {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        if local_ranks <= cores {
            SpinPolicy { spins: 2_000, yields: 16 }
        } else {
            SpinPolicy { spins: 0, yields: 64 }
        }
    }

    /// For background threads: leave the core to the thread that computes.
    pub(crate) const BACKGROUND: SpinPolicy = SpinPolicy { spins: 50, yields: 4 };
}

/// Rank and limits on whose behalf a call waits.
pub(crate) struct Caller {
    pub board: Arc<Board>,
    /// World rank of the caller.
    pub rank: usize,
    pub timeout: Duration,
}

/// A call in progress: its name, its deadline, and the board that shows whether the world is broken.
pub(crate) struct Watch {
    pub board: Arc<Board>,
    /// World rank of the caller.
    pub rank: usize,
    pub group_name: Arc<str>,
    pub call: Call,
    /// Earlier calls of the group; compared together with the call.
    pub history: CallHistory,
    pub started: Instant,
    pub timeout: Duration,
    pub spin: SpinPolicy,
    /// Our entry on the board.
    place: Option<usize>,
    /// When the board was last inspected, as time since the start of the call.
    inspected: Cell<Duration>,
    /// A peer that has left or is in a later call, and since when we have received nothing from it.
    gone: Cell<Option<(usize, Duration)>>,
}

impl Watch {
    /// Starts a call: publishes it on the board. Fails if the world is broken.
    pub(crate) fn begin(
        caller: Caller,
        group_name: Arc<str>,
        call: Call,
        spin: SpinPolicy,
    ) -> Result<Watch> {
        let Caller { board, rank, timeout } = caller;
        let place = board.enter(rank, &call);
        let watch = Watch {
            board,
            rank,
            group_name,
            call,
            history: CallHistory::default(),
            started: Instant::now(),
            timeout,
            spin,
            place,
            inspected: Cell::default(),
            gone: Cell::default(),
        };
        watch.check_intact().map(|()| watch)
    }

    /// Waits until `ready`, which depends on world rank `peer`; `peer` rings `bell` after every change.
    #[inline]
    pub(crate) fn wait(
        &self,
        peer: usize,
        bell: &Bell,
        mut ready: impl FnMut() -> bool,
    ) -> Result<()> {
        if ready() {
            return Ok(());
        }
        for _ in 0..self.spin.spins {
            std::hint::spin_loop();
            if ready() {
                return Ok(());
            }
        }
        for _ in 0..self.spin.yields {
            std::thread::yield_now();
            if ready() {
                return Ok(());
            }
        }
        self.wait_asleep(peer, bell, ready)
    }

    #[cold]
    fn wait_asleep(&self, peer: usize, bell: &Bell, mut ready: impl FnMut() -> bool) -> Result<()> {
        self.waiting_for(Some(peer));
        loop {
            // Read before the last poll, so that actions of the peer before it left are seen.
            let gone = matches!(self.board.state(peer), RankState::Left | RankState::Failed);
            if ready() {
                break;
            }
            if gone {
                return Err(self.peer_left(peer));
            }
            self.check(peer)?;
            bell.sleep_unless(&mut ready, SLICE);
        }
        self.waiting_for(None);
        Ok(())
    }

    /// Waits until a socket can move bytes, or for a limited time. If the other direction uses shared
    /// memory, the limit is short, because the kernel cannot wait for it.
    pub(crate) fn wait_sockets(
        &self,
        peer: usize,
        sockets: &SocketWait,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        self.check(peer)?;
        self.waiting_for(Some(peer));
        let limit = if sockets.mixed { Duration::from_micros(200) } else { SLICE };
        // While nothing moves, the board shows us as waiting without interruption.
        if ready() || sockets.poll(limit) {
            self.waiting_for(None);
            self.gone.set(None);
        }
        Ok(())
    }

    /// The error for a broken connection to a peer. Usually the peer died or the world is breaking, and
    /// the notice is about to arrive; only if it does not, the socket's error is reported.
    pub(crate) fn lost(&self, peer: usize, error: &dyn std::fmt::Display) -> Error {
        let until = Instant::now() + GRACE;
        while Instant::now() < until && self.board.state(peer) != RankState::Left {
            if let Some(failure) = self.board.wait_for_alarm(Duration::from_millis(20)) {
                return self.error(Some(peer), failure);
            }
        }
        if self.board.state(peer) == RankState::Left {
            return self.peer_left(peer);
        }
        let text = format!(
            "rank {} lost its connection to rank {peer} in {} of group {}: {error}",
            self.rank, self.call, self.group_name
        );
        self.raise(Some(peer), Failure { culprit: peer, cause: Cause::Died, text })
    }

    /// The error for data from a peer that was changed on the way.
    pub(crate) fn corrupt(&self, peer: usize, error: &dyn std::fmt::Display) -> Error {
        let text = format!(
            "rank {} cannot use what rank {peer} sent in {} of group {}: {error}",
            self.rank, self.call, self.group_name
        );
        self.raise(Some(peer), Failure { culprit: peer, cause: Cause::Corrupt, text })
    }

    /// Fails if the world is broken.
    pub(crate) fn check_intact(&self) -> Result<()> {
        match self.board.alarm() {
            Some(failure) => Err(self.error(None, failure)),
            None => Ok(()),
        }
    }

    /// Fails if the world is broken, the ranks disagree, the peer is gone or the deadline has passed.
    pub(crate) fn check(&self, peer: usize) -> Result<()> {
        self.check_peer(peer)?;
        if self.started.elapsed() < self.timeout {
            return Ok(());
        }
        Err(self.raise(Some(peer), self.stalled(peer)))
    }

    /// [`Watch::check`] for callers that look often: the peer is only asked for when there is something to inspect.
    pub(crate) fn check_often(&self, peer: impl FnOnce() -> usize) -> Result<()> {
        self.check_intact()?;
        let waited = self.started.elapsed();
        match waited < self.timeout && waited < self.inspected.get() + SLICE {
            true => Ok(()),
            false => self.check(peer()),
        }
    }

    /// Gives the call its full time from now on.
    pub(crate) fn restart(&mut self) {
        self.started = Instant::now();
        self.inspected.set(Duration::ZERO);
        self.gone.set(None);
    }

    /// The failure behind a call that has waited too long for a peer.
    fn stalled(&self, peer: usize) -> Failure {
        let stalled = StalledCall {
            rank: self.rank,
            peer,
            call: &self.call,
            group_name: &self.group_name,
            seconds: self.started.elapsed().as_secs_f64(),
        };
        blame(&self.board.statuses(), &stalled)
    }

    /// When the call gives up.
    pub(crate) fn deadline(&self) -> Instant {
        self.started + self.timeout
    }

    /// The error for a peer to which no connection could be opened before the deadline.
    pub(crate) fn unreachable(&self, peer: usize, error: &dyn std::fmt::Display) -> Error {
        let stalled = self.stalled(peer);
        if stalled.cause == Cause::Silent {
            return self.raise(Some(peer), stalled);
        }
        let text = format!(
            "rank {} cannot connect to rank {peer} in {} of group {}: {error}",
            self.rank, self.call, self.group_name
        );
        self.raise(Some(peer), Failure { culprit: peer, cause: Cause::Late, text })
    }

    /// [`Watch::check`] without the deadline.
    pub(crate) fn check_peer(&self, peer: usize) -> Result<()> {
        if let Some(failure) = self.board.alarm() {
            return Err(self.error(Some(peer), failure));
        }
        let waited = self.started.elapsed();
        if waited >= self.inspected.get() + SLICE {
            self.inspected.set(waited);
            self.inspect_board(peer, waited)?;
        }
        Ok(())
    }

    /// Detects what missing messages cannot show: another member is in this call with other arguments, or
    /// the peer has left or is in a later call.
    fn inspect_board(&self, peer: usize, waited: Duration) -> Result<()> {
        let ours = self.call.words();
        let others = match self.call.kind {
            Collective::SendRecv => vec![],
            _ => self.board.ranks_in(self.call.group, self.call.sequence),
        };
        if let Some((rank, theirs)) = others.into_iter().find(|(_, theirs)| *theirs != ours) {
            return Err(self.disagreement(rank, &Call::describe(theirs)));
        }
        let left = self.board.state(peer) == RankState::Left;
        let later = self.later_call_of(peer);
        if !left && later.is_none() {
            return Ok(());
        }
        // Its earlier messages may still be on their way.
        let (_, since) = self.gone.get().filter(|(who, _)| *who == peer).unwrap_or((peer, waited));
        self.gone.set(Some((peer, since)));
        match later {
            _ if waited < since + GRACE.max(self.timeout / 4) => Ok(()),
            Some(later) => Err(self.disagreement(peer, &format!("{later}, a later call"))),
            None => Err(self.peer_left(peer)),
        }
    }

    /// A later call of our group that the peer is already in.
    fn later_call_of(&self, peer: usize) -> Option<Call> {
        if self.call.kind == Collective::SendRecv {
            return None;
        }
        let is_later = |call: &Call| {
            (call.group, call.kind != Collective::SendRecv) == (self.call.group, true)
                && call.sequence > self.call.sequence
        };
        self.board.active_calls(peer).into_iter().filter_map(|a| a.call()).find(is_later)
    }

    pub(crate) fn waiting_for(&self, peer: Option<usize>) {
        if let Some(place) = self.place {
            self.board.wait_for(self.rank, place, peer);
        }
    }

    pub(crate) fn connecting_to(&self, peer: usize) {
        if let Some(place) = self.place {
            self.board.connect_to(self.rank, place, peer);
        }
    }

    /// The error for a peer that has left the world although the call needs it.
    pub(crate) fn peer_left(&self, peer: usize) -> Error {
        // If it left because the world broke, report that failure; its notice may still be on its way.
        if self.board.state(peer) == RankState::Failed
            && let Some(failure) = self.board.wait_for_alarm(GRACE)
        {
            return self.error(Some(peer), failure);
        }
        let text = format!(
            "rank {peer} has left the world, but rank {} waits for it in {} of group {}",
            self.rank, self.call, self.group_name
        );
        self.raise(Some(peer), Failure { culprit: peer, cause: Cause::Left, text })
    }

    /// The words that members compare before data moves.
    pub(crate) fn stamp(&self) -> Stamp {
        self.history.stamp(&self.call)
    }

    /// The error for a peer whose stamp differs from ours.
    pub(crate) fn differs(&self, peer: usize, theirs: &Stamp) -> Error {
        self.disagreement(peer, &self.history.difference(&self.call, theirs))
    }

    /// The error for a peer that made a different call; its text contains both calls.
    pub(crate) fn disagreement(&self, peer: usize, theirs: &str) -> Error {
        let text = format!(
            "ranks disagree in group {}: rank {} calls {}, rank {peer} calls {theirs}",
            self.group_name, self.rank, self.call
        );
        let culprit = self.minority(peer);
        self.raise(Some(peer), Failure { culprit, cause: Cause::Disagreed, text })
    }

    /// The one of two disagreeing ranks, this one and `peer`, that fewer members agree with, as far as the
    /// board shows them.
    fn minority(&self, peer: usize) -> usize {
        let ours = self.call.words();
        let all = self.board.ranks_in(self.call.group, self.call.sequence);
        let with_us = all.iter().filter(|(_, words)| *words == ours).count();
        if with_us < all.len() - with_us { self.rank } else { peer }
    }

    /// Breaks the world and returns the error of this call.
    pub(crate) fn raise(&self, peer: Option<usize>, failure: Failure) -> Error {
        let raised = self.board.raise_and_forward(self.rank, &failure);
        self.error(peer, raised)
    }

    pub(crate) fn error(&self, peer: Option<usize>, failure: Failure) -> Error {
        Error::Broken {
            rank: self.rank,
            group: self.group_name.to_string(),
            call: self.call,
            peer,
            waited: self.started.elapsed(),
            failure: Box::new(failure),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.board.leave(self.rank, place);
        }
    }
}
