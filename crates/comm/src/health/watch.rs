//! Waiting for a peer: how long to spin, when to sleep, when to give up, and what to say then.
//! Every wait of this crate goes through here, so every wait has a deadline and a name.

use crate::call::Call;
use crate::call::error::{Cause, Error, Failure, Result};
use crate::health::blame::blame;
use crate::health::board::{Board, State};
use crate::health::past::{Past, Stamp};
use crate::memory::bell::Bell;
use lockstep_types::Collective;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest sleep before the board is looked at again: what bounds the time from an alarm to the
/// error of a rank that sleeps.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How long word of a failure may take, and data from a rank that has left, before we judge by what
/// we see ourselves.
const GRACE: Duration = Duration::from_millis(1000);

/// How a waiting thread spends its time before it sleeps in the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Looks with a pause instruction between them.
    pub spins: u32,
    /// Looks with a yield of the processor between them.
    pub yields: u32,
}

impl Patience {
    /// Spinning pays only while every rank of the host has a core of its own. With more ranks than
    /// cores the peer needs this very core: yield it a few times, then sleep.
    pub(crate) fn for_ranks(local_ranks: usize) -> Patience {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        if local_ranks <= cores {
            Patience { spins: 2_000, yields: 16 }
        } else {
            Patience { spins: 0, yields: 64 }
        }
    }

    /// For work beside a thread that computes: leave it the core.
    pub(crate) const BACKGROUND: Patience = Patience { spins: 50, yields: 4 };
}

/// One call under way: its name, its deadline and the board that says whether the world still stands.
pub(crate) struct Watch {
    pub board: Arc<Board>,
    /// World rank of the caller.
    pub rank: usize,
    pub group_name: Arc<str>,
    pub call: Call,
    /// What the group called before; compared where members compare calls.
    pub past: Past,
    pub started: Instant,
    pub timeout: Duration,
    pub patience: Patience,
    /// Our place on the board.
    place: Option<usize>,
    /// How far into the call the board was last compared with it.
    looked: Cell<Duration>,
    /// A peer that the board says has left or gone on, and since when nothing has come from it.
    gone: Cell<Option<(usize, Duration)>>,
}

impl Watch {
    /// Starts a call: looks at the board and writes itself there.
    pub(crate) fn begin(
        board: Arc<Board>,
        rank: usize,
        group_name: Arc<str>,
        call: Call,
        timeout: Duration,
        patience: Patience,
    ) -> Result<Watch> {
        let place = board.enter(rank, &call);
        let started = Instant::now();
        let (looked, gone) = (Cell::default(), Cell::default());
        let watch = Watch {
            board,
            rank,
            group_name,
            call,
            past: Past::default(),
            started,
            timeout,
            patience,
            place,
            looked,
            gone,
        };
        match watch.board.alarm() {
            Some(failure) => Err(watch.error(None, failure)),
            None => Ok(watch),
        }
    }

    /// Waits until `ready`, for something that world rank `peer` must do. `bell` is the one that this
    /// peer rings when it has.
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
        for _ in 0..self.patience.spins {
            std::hint::spin_loop();
            if ready() {
                return Ok(());
            }
        }
        for _ in 0..self.patience.yields {
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
            // Read before the last look: what the peer did before it left must still count.
            let gone = matches!(self.board.state(peer), State::Left | State::Failed);
            if ready() {
                break;
            }
            if gone {
                return Err(self.deserted(peer));
            }
            self.check(peer)?;
            bell.sleep_unless(&mut ready, SLICE);
        }
        self.waiting_for(None);
        Ok(())
    }

    /// Waits until a socket can move bytes. `mixed` says that the peer of the other direction is
    /// reached through shared memory, which the kernel does not watch: then look at it now and then.
    pub(crate) fn wait_sockets(
        &self,
        peer: usize,
        to_write: Option<RawFd>,
        to_read: Option<RawFd>,
        mixed: bool,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        self.check(peer)?;
        self.waiting_for(Some(peer));
        let limit = if mixed { Duration::from_micros(200) } else { SLICE };
        // As long as nothing moves we are seen waiting, without a gap.
        if ready() || crate::link::socket::poll(to_write, to_read, limit) {
            self.waiting_for(None);
            self.gone.set(None);
        }
        Ok(())
    }

    /// The connection to a peer broke. Mostly the peer died or the world is breaking, and the word
    /// of that is on its way: only if none comes, say what the socket said.
    pub(crate) fn lost(&self, peer: usize, error: &dyn std::fmt::Display) -> Error {
        let until = Instant::now() + GRACE;
        while Instant::now() < until && self.board.state(peer) != State::Left {
            if let Some(failure) = self.board.await_alarm(Duration::from_millis(20)) {
                return self.error(Some(peer), failure);
            }
        }
        if self.board.state(peer) == State::Left {
            return self.deserted(peer);
        }
        let text = format!(
            "rank {} lost its connection to rank {peer} in {} of group {}: {error}",
            self.rank, self.call, self.group_name
        );
        self.raise(Some(peer), Failure { guilty: peer, cause: Cause::Died, text })
    }

    /// An error if the world is broken.
    pub(crate) fn standing(&self) -> Result<()> {
        match self.board.alarm() {
            Some(failure) => Err(self.error(None, failure)),
            None => Ok(()),
        }
    }

    /// An error if the world is broken, the ranks disagree, the peer is gone or the deadline over.
    pub(crate) fn check(&self, peer: usize) -> Result<()> {
        if let Some(failure) = self.board.alarm() {
            return Err(self.error(Some(peer), failure));
        }
        let waited = self.started.elapsed();
        if waited >= self.looked.get() + SLICE {
            self.looked.set(waited);
            self.look_around(peer, waited)?;
        }
        if waited < self.timeout {
            return Ok(());
        }
        let sights = self.board.sights();
        let seconds = waited.as_secs_f64();
        let failure = blame(&sights, self.rank, peer, &self.call, &self.group_name, seconds);
        Err(self.raise(Some(peer), failure))
    }

    /// What cannot be learned from messages that never come: that another member is in this very
    /// call with other arguments, or that the peer has left, or gone on without us.
    fn look_around(&self, peer: usize, waited: Duration) -> Result<()> {
        let ours = self.call.words();
        let others = match self.call.kind {
            Collective::SendRecv => vec![],
            _ => self.board.seen_in(self.call.group, self.call.sequence),
        };
        if let Some((rank, theirs)) = others.into_iter().find(|(_, theirs)| *theirs != ours) {
            return Err(self.disagreement(rank, &Call::describe(theirs)));
        }
        let left = self.board.state(peer) == State::Left;
        let later = self.later_call_of(peer);
        if !left && later.is_none() {
            return Ok(());
        }
        // What it sent before that may still be on its way.
        let (_, since) = self.gone.get().filter(|(who, _)| *who == peer).unwrap_or((peer, waited));
        self.gone.set(Some((peer, since)));
        match later {
            _ if waited < since + GRACE.max(self.timeout / 4) => Ok(()),
            Some(later) => Err(self.disagreement(peer, &format!("{later} already"))),
            None => Err(self.deserted(peer)),
        }
    }

    /// A call of our group that the peer is in, though we still wait for its part in ours.
    fn later_call_of(&self, peer: usize) -> Option<Call> {
        if self.call.kind == Collective::SendRecv {
            return None;
        }
        let is_later = |call: &Call| {
            (call.group, call.kind != Collective::SendRecv) == (self.call.group, true)
                && call.sequence > self.call.sequence
        };
        self.board.doing(peer).into_iter().filter_map(|doing| doing.call()).find(is_later)
    }

    pub(crate) fn waiting_for(&self, peer: Option<usize>) {
        if let Some(place) = self.place {
            self.board.wait_for(self.rank, place, peer);
        }
    }

    /// The peer is no longer in the world, but we need it.
    pub(crate) fn deserted(&self, peer: usize) -> Error {
        // If it left because the world broke, that is the reason to report; it may be on its way.
        if self.board.state(peer) == State::Failed
            && let Some(failure) = self.board.await_alarm(GRACE)
        {
            return self.error(Some(peer), failure);
        }
        let text = format!(
            "rank {peer} has left the world, but rank {} still needs it in {} of group {}",
            self.rank, self.call, self.group_name
        );
        self.raise(Some(peer), Failure { guilty: peer, cause: Cause::Left, text })
    }

    /// What members compare before they exchange data.
    pub(crate) fn stamp(&self) -> Stamp {
        self.past.stamp(&self.call)
    }

    /// A peer's stamp is not ours.
    pub(crate) fn differs(&self, peer: usize, theirs: &Stamp) -> Error {
        self.disagreement(peer, &self.past.difference(&self.call, theirs))
    }

    /// The peer made another call in our place: both calls, for everybody to read.
    pub(crate) fn disagreement(&self, peer: usize, theirs: &str) -> Error {
        let text = format!(
            "ranks disagree in group {}: rank {} calls {}, rank {peer} calls {theirs}",
            self.group_name, self.rank, self.call
        );
        let guilty = self.odd_one_out(peer);
        self.raise(Some(peer), Failure { guilty, cause: Cause::Disagreed, text })
    }

    /// Of us and a peer that disagrees with us: the one whom fewer members agree with, as far as the
    /// board shows them.
    fn odd_one_out(&self, peer: usize) -> usize {
        let ours = self.call.words();
        let all = self.board.seen_in(self.call.group, self.call.sequence);
        let with_us = all.iter().filter(|(_, words)| *words == ours).count();
        if with_us < all.len() - with_us { self.rank } else { peer }
    }

    /// Breaks the world, and gives the error of this call.
    pub(crate) fn raise(&self, peer: Option<usize>, failure: Failure) -> Error {
        let standing = self.board.raise_aloud(self.rank, &failure);
        self.error(peer, standing)
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
