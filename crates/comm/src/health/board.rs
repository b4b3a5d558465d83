//! Who is there, what each rank is doing, and whether the world is broken: the notice board of one
//! host, in memory that all its ranks have mapped. Never decides anything: see `blame` and `pulse`.

use crate::call::error::Failure;
use crate::call::{Call, CallWords};
use crate::health::alarm::Alarm;
use crate::memory::segment::{Offer, Segment};
use lockstep_types::Collective;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Calls of one rank that can be seen on the board at a time; more go on unseen.
const ACTS: usize = 8;

#[repr(C, align(128))]
struct Slot {
    state: AtomicU32,
    /// When the rank last gave a sign of life, on this host's monotonic clock.
    beat_ms: AtomicU64,
    /// Whether the rank's heartbeat has passed the alarm on.
    told: AtomicU32,
    acts: [Act; ACTS],
}

#[repr(C)]
struct Act {
    busy: AtomicU32,
    /// World rank that is waited for, plus one.
    waiting: AtomicU32,
    call: [AtomicU64; 4],
}

/// Where a rank is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Joining,
    Running,
    Left,
    Failed,
}

/// One call that a rank is in.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Doing {
    pub words: CallWords,
    /// World rank that it waits for.
    pub waiting_for: Option<usize>,
}

impl Doing {
    pub(crate) fn call(&self) -> Option<Call> {
        Call::from_words(self.words)
    }
}

/// What the board shows of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    pub state: State,
    pub silent_ms: u64,
    pub doing: Vec<Doing>,
}

pub(crate) struct Board {
    segment: Segment,
    ranks: usize,
}

impl Board {
    pub(crate) fn bytes(ranks: usize) -> usize {
        Self::slot_offset(ranks)
    }

    fn slot_offset(rank: usize) -> usize {
        size_of::<Alarm>().next_multiple_of(128) + rank * size_of::<Slot>()
    }

    pub(crate) fn create(ranks: usize) -> io::Result<(Board, Offer)> {
        let (segment, offer) = Segment::create(Self::bytes(ranks))?;
        Ok((Board { segment, ranks }, offer))
    }

    pub(crate) fn over(segment: Segment, ranks: usize) -> Board {
        Board { segment, ranks }
    }

    fn alarm_record(&self) -> &Alarm {
        // SAFETY: every board begins with an Alarm, made of atomics that may be zero.
        unsafe { self.segment.shared(0) }
    }

    fn slot(&self, rank: usize) -> &Slot {
        assert!(rank < self.ranks);
        // SAFETY: the slots follow the alarm; they are made of atomics that may be zero.
        unsafe { self.segment.shared(Self::slot_offset(rank)) }
    }

    pub(crate) fn set_state(&self, rank: usize, state: State) {
        let code = match state {
            State::Joining => 0,
            State::Running => 1,
            State::Left => 2,
            State::Failed => 3,
        };
        self.slot(rank).state.store(code, Ordering::Release);
    }

    pub(crate) fn state(&self, rank: usize) -> State {
        match self.slot(rank).state.load(Ordering::Acquire) {
            0 => State::Joining,
            1 => State::Running,
            2 => State::Left,
            _ => State::Failed,
        }
    }

    /// A sign of life.
    pub(crate) fn beat(&self, rank: usize) {
        self.slot(rank).beat_ms.store(monotonic_ms(), Ordering::Relaxed);
    }

    /// Zero for a rank that never gave one.
    pub(crate) fn silent_ms(&self, rank: usize) -> u64 {
        match self.slot(rank).beat_ms.load(Ordering::Relaxed) {
            0 => 0,
            last => monotonic_ms().saturating_sub(last),
        }
    }

    /// Shows that `rank` is in this call; gives the place to say more, if one was free.
    pub(crate) fn enter(&self, rank: usize, call: &Call) -> Option<usize> {
        let acts = &self.slot(rank).acts;
        let place = acts.iter().position(|a| {
            a.busy.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        for (word, value) in acts[place].call.iter().zip(call.words()) {
            word.store(value, Ordering::Relaxed);
        }
        acts[place].busy.store(2, Ordering::Release);
        Some(place)
    }

    pub(crate) fn wait_for(&self, rank: usize, place: usize, peer: Option<usize>) {
        let peer = peer.map_or(0, |p| p as u32 + 1);
        self.slot(rank).acts[place].waiting.store(peer, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self, rank: usize, place: usize) {
        self.wait_for(rank, place, None);
        self.slot(rank).acts[place].busy.store(0, Ordering::Release);
    }

    pub(crate) fn doing(&self, rank: usize) -> Vec<Doing> {
        self.slot(rank).acts.iter().filter_map(Act::read_whole).collect()
    }

    /// Writes down what a rank of another host said of itself.
    pub(crate) fn mirror(&self, rank: usize, state: State, doing: &[Doing]) {
        self.set_state(rank, state);
        for (i, act) in self.slot(rank).acts.iter().enumerate() {
            act.busy.store(0, Ordering::Release);
            let Some(doing) = doing.get(i) else { continue };
            for (word, value) in act.call.iter().zip(doing.words) {
                word.store(value, Ordering::Relaxed);
            }
            let waiting = doing.waiting_for.map_or(0, |p| p as u32 + 1);
            act.waiting.store(waiting, Ordering::Relaxed);
            act.busy.store(2, Ordering::Release);
        }
    }

    /// World ranks that are seen in call `sequence` of a group, with the call as each of them makes
    /// it. Single messages have numbers of their own and are not counted.
    pub(crate) fn seen_in(&self, group: u64, sequence: u64) -> Vec<(usize, CallWords)> {
        let collective = |d: &Doing| d.call().is_some_and(|c| c.kind != Collective::SendRecv);
        (0..self.ranks)
            .filter_map(|rank| {
                let mut doing = self.doing(rank).into_iter();
                let found = doing.find(|d| d.words[2..] == [sequence, group] && collective(d))?;
                Some((rank, found.words))
            })
            .collect()
    }

    pub(crate) fn sights(&self) -> Vec<Sight> {
        (0..self.ranks)
            .map(|r| Sight {
                state: self.state(r),
                silent_ms: self.silent_ms(r),
                doing: self.doing(r),
            })
            .collect()
    }

    /// Breaks the world. The first failure stands; the one that stands comes back.
    pub(crate) fn raise(&self, failure: &Failure) -> Failure {
        self.alarm_record().raise(failure)
    }

    /// Breaks the world for all to hear: a rank that raises an alarm may end its process the moment
    /// after, and the others must know by then that it was not the reason.
    pub(crate) fn raise_aloud(&self, rank: usize, failure: &Failure) -> Failure {
        let standing = self.raise(failure);
        let has_heartbeat = self.slot(rank).beat_ms.load(Ordering::Relaxed) != 0;
        let until = Instant::now() + Duration::from_millis(300);
        while has_heartbeat && standing == *failure && !self.told(rank) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        standing
    }

    fn told(&self, rank: usize) -> bool {
        self.slot(rank).told.load(Ordering::Acquire) != 0
    }

    /// Says that the alarm has been passed on to other hosts.
    pub(crate) fn set_told(&self, rank: usize) {
        self.slot(rank).told.store(1, Ordering::Release);
    }

    #[inline]
    pub(crate) fn broken(&self) -> bool {
        self.alarm_record().raised()
    }

    /// The failure that broke the world.
    pub(crate) fn alarm(&self) -> Option<Failure> {
        self.alarm_record().standing()
    }

    /// The failure that broke the world, if it is known within `limit`.
    pub(crate) fn await_alarm(&self, limit: Duration) -> Option<Failure> {
        self.alarm_record().await_standing(limit)
    }
}

impl Act {
    fn read(&self) -> Option<Doing> {
        if self.busy.load(Ordering::Acquire) != 2 {
            return None;
        }
        Some(Doing {
            words: std::array::from_fn(|i| self.call[i].load(Ordering::Acquire)),
            waiting_for: (self.waiting.load(Ordering::Relaxed) as usize).checked_sub(1),
        })
    }

    /// What stands here, unless it is being replaced: half of one call and half of the next would
    /// accuse a rank of a call that it never made.
    fn read_whole(&self) -> Option<Doing> {
        let seen = self.read()?;
        self.read().filter(|again| again.words == seen.words)
    }
}

/// Milliseconds on the clock that all processes of a host share and nobody sets.
pub(crate) fn monotonic_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::error::Cause;
    use crate::health::alarm::TEXT;

    #[test]
    fn the_first_failure_stands() {
        let (board, _offer) = Board::create(3).unwrap();
        assert_eq!(board.alarm(), None);
        let first = Failure { guilty: 2, cause: Cause::Died, text: "rank 2 died".into() };
        let later = Failure { guilty: 1, cause: Cause::Late, text: "rank 1 is late".into() };
        assert_eq!(board.raise(&first), first);
        assert_eq!(board.raise(&later), first);
        assert_eq!(board.alarm(), Some(first));
    }

    #[test]
    fn a_rank_that_dies_while_it_writes_holds_nobody_up() {
        let (board, _offer) = Board::create(2).unwrap();
        board.alarm_record().claim();
        let failure = Failure { guilty: 1, cause: Cause::Died, text: "rank 1 died".into() };
        assert_eq!(board.raise(&failure), failure);
        assert_eq!(board.alarm(), Some(failure));
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        let (board, _offer) = Board::create(1).unwrap();
        board.raise(&Failure { guilty: 0, cause: Cause::Failed, text: "é".repeat(TEXT) });
        assert_eq!(board.alarm().unwrap().text, "é".repeat(TEXT / 2));
    }
}
