//! The board of a host, in memory that all its ranks have mapped: state, heartbeat and active calls of
//! each rank, and the failure if the world is broken. Decides nothing: see `blame` and
//! `failure_detector`.

use crate::call::error::Failure;
use crate::call::{Call, CallWords};
use crate::health::alarm::Alarm;
use crate::memory::segment::{Offer, Segment};
use lockstep_types::Collective;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of calls of one rank on the board; further calls are not shown.
const CALLS: usize = 8;

/// Bit of `CallEntry::waiting`: the call waits for a connection that it has asked for.
const CONNECTING: u32 = 1 << 31;

#[repr(C, align(128))]
struct RankEntry {
    state: AtomicU32,
    /// Time of the last heartbeat, on this host's monotonic clock.
    heartbeat_ms: AtomicU64,
    /// Whether the rank's heartbeat thread has forwarded the alarm.
    alarm_forwarded: AtomicU32,
    calls: [CallEntry; CALLS],
}

#[repr(C)]
struct CallEntry {
    /// 0: free, 1: being written, 2: in use.
    status: AtomicU32,
    /// World rank that the call waits for, plus one; may have the bit `CONNECTING`.
    waiting: AtomicU32,
    call: [AtomicU64; 4],
}

/// Lifecycle of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankState {
    Joining,
    Running,
    Left,
    Failed,
}

/// A call that a rank is in.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ActiveCall {
    pub words: CallWords,
    /// World rank that the call waits for.
    pub waiting_for: Option<usize>,
    /// Whether it waits for a connection to that rank, which needs nothing of the rank but its listener.
    pub connecting: bool,
}

impl ActiveCall {
    pub(crate) fn call(&self) -> Option<Call> {
        Call::from_words(self.words)
    }
}

/// Snapshot of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankStatus {
    pub state: RankState,
    pub silent_ms: u64,
    pub calls: Vec<ActiveCall>,
}

pub(crate) struct Board {
    segment: Segment,
    ranks: usize,
}

impl Board {
    pub(crate) fn bytes(ranks: usize) -> usize {
        Self::entry_offset(ranks)
    }

    fn entry_offset(rank: usize) -> usize {
        size_of::<Alarm>().next_multiple_of(128) + rank * size_of::<RankEntry>()
    }

    pub(crate) fn create(ranks: usize) -> io::Result<(Board, Offer)> {
        let (segment, offer) = Segment::create(Self::bytes(ranks))?;
        Ok((Board { segment, ranks }, offer))
    }

    pub(crate) fn from_segment(segment: Segment, ranks: usize) -> Board {
        Board { segment, ranks }
    }

    fn alarm_record(&self) -> &Alarm {
        // SAFETY: every board begins with an Alarm, which consists of atomics that may be zero.
        unsafe { self.segment.shared(0) }
    }

    fn entry(&self, rank: usize) -> &RankEntry {
        assert!(rank < self.ranks);
        // SAFETY: the entries follow the alarm; they consist of atomics that may be zero.
        unsafe { self.segment.shared(Self::entry_offset(rank)) }
    }

    pub(crate) fn set_state(&self, rank: usize, state: RankState) {
        let code = match state {
            RankState::Joining => 0,
            RankState::Running => 1,
            RankState::Left => 2,
            RankState::Failed => 3,
        };
        self.entry(rank).state.store(code, Ordering::Release);
    }

    pub(crate) fn state(&self, rank: usize) -> RankState {
        match self.entry(rank).state.load(Ordering::Acquire) {
            0 => RankState::Joining,
            1 => RankState::Running,
            2 => RankState::Left,
            _ => RankState::Failed,
        }
    }

    /// Records a heartbeat.
    pub(crate) fn beat(&self, rank: usize) {
        self.entry(rank).heartbeat_ms.store(monotonic_ms(), Ordering::Relaxed);
    }

    /// Time since the last heartbeat; zero for a rank without heartbeats.
    pub(crate) fn silent_ms(&self, rank: usize) -> u64 {
        match self.entry(rank).heartbeat_ms.load(Ordering::Relaxed) {
            0 => 0,
            last => monotonic_ms().saturating_sub(last),
        }
    }

    /// Publishes that `rank` is in this call; returns the index of its entry, if one was free.
    pub(crate) fn enter(&self, rank: usize, call: &Call) -> Option<usize> {
        let calls = &self.entry(rank).calls;
        let place = calls.iter().position(|c| {
            c.status.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })?;
        for (word, value) in calls[place].call.iter().zip(call.words()) {
            word.store(value, Ordering::Relaxed);
        }
        calls[place].status.store(2, Ordering::Release);
        Some(place)
    }

    pub(crate) fn wait_for(&self, rank: usize, place: usize, peer: Option<usize>) {
        let peer = peer.map_or(0, |p| p as u32 + 1);
        self.entry(rank).calls[place].waiting.store(peer, Ordering::Relaxed);
    }

    pub(crate) fn connect_to(&self, rank: usize, place: usize, peer: usize) {
        let waiting = (peer as u32 + 1) | CONNECTING;
        self.entry(rank).calls[place].waiting.store(waiting, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self, rank: usize, place: usize) {
        self.wait_for(rank, place, None);
        self.entry(rank).calls[place].status.store(0, Ordering::Release);
    }

    pub(crate) fn active_calls(&self, rank: usize) -> Vec<ActiveCall> {
        self.entry(rank).calls.iter().filter_map(CallEntry::read_consistent).collect()
    }

    /// Copies the state and calls of a rank of another host to this board.
    pub(crate) fn mirror(&self, rank: usize, state: RankState, calls: &[ActiveCall]) {
        self.set_state(rank, state);
        for (i, entry) in self.entry(rank).calls.iter().enumerate() {
            entry.status.store(0, Ordering::Release);
            let Some(call) = calls.get(i) else { continue };
            for (word, value) in entry.call.iter().zip(call.words) {
                word.store(value, Ordering::Relaxed);
            }
            let connecting = if call.connecting { CONNECTING } else { 0 };
            let waiting = call.waiting_for.map_or(0, |p| (p as u32 + 1) | connecting);
            entry.waiting.store(waiting, Ordering::Relaxed);
            entry.status.store(2, Ordering::Release);
        }
    }

    /// World ranks that are in call `sequence` of a group, with the call as each of them makes it.
    /// Point-to-point messages are numbered separately and not included.
    pub(crate) fn ranks_in(&self, group: u64, sequence: u64) -> Vec<(usize, CallWords)> {
        let collective = |a: &ActiveCall| a.call().is_some_and(|c| c.kind != Collective::SendRecv);
        (0..self.ranks)
            .filter_map(|rank| {
                let mut calls = self.active_calls(rank).into_iter();
                let found = calls.find(|a| a.words[2..] == [sequence, group] && collective(a))?;
                Some((rank, found.words))
            })
            .collect()
    }

    pub(crate) fn statuses(&self) -> Vec<RankStatus> {
        (0..self.ranks)
            .map(|r| RankStatus {
                state: self.state(r),
                silent_ms: self.silent_ms(r),
                calls: self.active_calls(r),
            })
            .collect()
    }

    /// Breaks the world. Returns the failure that all ranks report: the first that was raised.
    pub(crate) fn raise(&self, failure: &Failure) -> Failure {
        self.alarm_record().raise(failure)
    }

    /// Breaks the world and waits until the heartbeat thread has forwarded the failure: the caller may end
    /// its process right after, and the others must not take that for the cause.
    pub(crate) fn raise_and_forward(&self, rank: usize, failure: &Failure) -> Failure {
        let raised = self.raise(failure);
        let has_heartbeat = self.entry(rank).heartbeat_ms.load(Ordering::Relaxed) != 0;
        let until = Instant::now() + Duration::from_secs(5);
        while has_heartbeat
            && raised == *failure
            && !self.alarm_forwarded(rank)
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        raised
    }

    fn alarm_forwarded(&self, rank: usize) -> bool {
        self.entry(rank).alarm_forwarded.load(Ordering::Acquire) != 0
    }

    /// Marks the alarm as forwarded to other hosts.
    pub(crate) fn set_alarm_forwarded(&self, rank: usize) {
        self.entry(rank).alarm_forwarded.store(1, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.alarm_record().is_raised()
    }

    /// The failure that broke the world.
    pub(crate) fn alarm(&self) -> Option<Failure> {
        self.alarm_record().failure()
    }

    /// Waits up to `limit` for the failure that broke the world.
    pub(crate) fn wait_for_alarm(&self, limit: Duration) -> Option<Failure> {
        self.alarm_record().wait_for_failure(limit)
    }
}

impl CallEntry {
    fn read(&self) -> Option<ActiveCall> {
        if self.status.load(Ordering::Acquire) != 2 {
            return None;
        }
        let waiting = self.waiting.load(Ordering::Relaxed);
        Some(ActiveCall {
            words: std::array::from_fn(|i| self.call[i].load(Ordering::Acquire)),
            waiting_for: ((waiting & !CONNECTING) as usize).checked_sub(1),
            connecting: waiting & CONNECTING != 0,
        })
    }

    /// Reads the call unless it is being replaced: a mixture of two calls would accuse a rank of a call
    /// that it never made.
    fn read_consistent(&self) -> Option<ActiveCall> {
        let first = self.read()?;
        self.read().filter(|second| second.words == first.words)
    }
}

/// Milliseconds on the monotonic clock, which all processes of a host share.
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
    fn the_first_failure_wins() {
        let (board, _offer) = Board::create(3).unwrap();
        assert_eq!(board.alarm(), None);
        let first = Failure { culprit: 2, cause: Cause::Died, text: "rank 2 died".into() };
        let later = Failure { culprit: 1, cause: Cause::Late, text: "rank 1 is late".into() };
        assert_eq!(board.raise(&first), first);
        assert_eq!(board.raise(&later), first);
        assert_eq!(board.alarm(), Some(first));
    }

    #[test]
    fn a_rank_that_dies_while_writing_blocks_nobody() {
        let (board, _offer) = Board::create(2).unwrap();
        board.alarm_record().claim();
        let failure = Failure { culprit: 1, cause: Cause::Died, text: "rank 1 died".into() };
        assert_eq!(board.raise(&failure), failure);
        assert_eq!(board.alarm(), Some(failure));
    }

    #[test]
    fn a_long_text_is_truncated_at_a_character_boundary() {
        let (board, _offer) = Board::create(1).unwrap();
        board.raise(&Failure { culprit: 0, cause: Cause::Failed, text: "é".repeat(TEXT) });
        assert_eq!(board.alarm().unwrap().text, "é".repeat(TEXT / 2));
    }
}
