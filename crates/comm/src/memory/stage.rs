//! Passing data on through memory that all members of a group on one host have mapped: numbered
//! slots that their owner fills and the others drain, and the posting by which members compare their
//! calls before anybody touches data. Knows nothing of the collectives made of it: see `algo::direct`.
//!
//! Each member counts, for each of two stages, how many slots it has *filled* and how many of the
//! others' rounds it has *drained*. All members go through the same rounds, so the counters are
//! comparable: round `n` may be read when its owner's `filled` has passed `n`, and its slot written
//! again when everybody's `drained` has passed `n`.

use crate::call::error::Result;
use crate::health::past::Stamp;
use crate::health::watch::Watch;
use crate::memory::arena::Arena;
use crate::memory::sync::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// Inputs pass through one stage, results through the other.
pub(crate) const STAGES: usize = 2;
/// Rounds that may be under way at a time.
pub(crate) const SLOTS: usize = 4;
/// Bytes a member can pass on in one round.
pub(crate) const SLOT_BYTES: usize = 256 << 10;

#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Counters {
    filled: AtomicU64,
    _apart: [u8; 56],
    drained: AtomicU64,
}

impl Counters {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Counters {
        Counters { filled: AtomicU64::new(0), _apart: [0; 56], drained: AtomicU64::new(0) }
    }

    /// Whether this member has filled its slot of a round, which may then be read.
    pub(crate) fn has_filled(&self, number: u64) -> bool {
        self.filled.load(Ordering::Acquire) > number
    }

    /// Whether this member has read all it wants from the round that had the same slots as `number`
    /// before, of `slots` in turn.
    pub(crate) fn has_freed(&self, number: u64, slots: u64) -> bool {
        number < slots || self.drained.load(Ordering::Acquire) > number - slots
    }

    pub(crate) fn fill(&self, number: u64) {
        self.filled.store(number + 1, Ordering::Release);
    }

    pub(crate) fn drain(&self, number: u64) {
        self.drained.store(number + 1, Ordering::Release);
    }
}

/// What a member calls and where its data lies: for the current direct operation and the previous
/// one, by parity. Two are enough, because every direct operation makes its members wait for each
/// other once after they announced it: who announces operation n+2 has seen everybody in n+1, and
/// so done with what was announced for n.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Postings([Posting; 2]);

#[derive(Debug)]
#[repr(C, align(64))]
struct Posting {
    stamp: [AtomicU64; 6],
    window: [AtomicU64; 3],
}

impl Postings {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Postings {
        let zero = |_| AtomicU64::new(0);
        let posting = || Posting { stamp: [0; 6].map(zero), window: [0; 3].map(zero) };
        Postings([posting(), posting()])
    }

    fn of(&self, number: u64) -> &Posting {
        &self.0[(number % 2) as usize]
    }

    /// Seen by the others with the next `fill`.
    pub(crate) fn announce(&self, number: u64, stamp: Stamp, window: Window) {
        let posting = self.of(number);
        for (word, value) in posting.stamp.iter().zip(stamp) {
            word.store(value, Ordering::Relaxed);
        }
        let packed = u64::from(window.pid) << 32 | u64::from(window.symmetric);
        posting.window[0].store(packed, Ordering::Relaxed);
        posting.window[1].store(window.at, Ordering::Relaxed);
        posting.window[2].store(window.offset, Ordering::Relaxed);
    }

    pub(crate) fn stamp(&self, number: u64) -> Stamp {
        std::array::from_fn(|i| self.of(number).stamp[i].load(Ordering::Relaxed))
    }

    pub(crate) fn window(&self, number: u64) -> Window {
        let posting = self.of(number);
        let packed = posting.window[0].load(Ordering::Relaxed);
        Window {
            pid: (packed >> 32) as u32,
            symmetric: packed as u32,
            at: posting.window[1].load(Ordering::Relaxed),
            offset: posting.window[2].load(Ordering::Relaxed),
        }
    }
}

/// Where a member's data lies, for peers that may be able to reach it in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub pid: u32,
    /// Which symmetric allocation of the group, or 0.
    pub symmetric: u32,
    /// Address in the process.
    pub at: u64,
    /// Offset in the symmetric allocation.
    pub offset: u64,
}

/// A member's side of the stages.
pub(crate) struct Stages {
    arena: Arena,
    /// Our seat.
    pub me: usize,
    /// World ranks by seat.
    pub ranks: Vec<usize>,
    /// Rounds begun, equal on all members.
    rounds: [u64; STAGES],
    postings: u64,
}

impl Stages {
    pub(crate) fn new(arena: Arena, me: usize, ranks: Vec<usize>) -> Stages {
        assert_eq!(arena.members(), ranks.len());
        Stages { arena, me, ranks, rounds: [0; STAGES], postings: 0 }
    }

    pub(crate) fn members(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        // Starting with the next seat, so that not all members read the same memory first.
        let n = self.ranks.len();
        (1..n).map(move |i| (me + i) % n)
    }

    /// Says what we call and where our data lies; seen by the others with the next `fill`.
    pub(crate) fn announce(&mut self, watch: &Watch, window: Window) {
        self.postings += 1;
        self.arena.seat(self.me).postings.announce(self.postings, watch.stamp(), window);
    }

    /// An error for everybody if a peer announced another call than we did.
    pub(crate) fn compare(&self, watch: &Watch) -> Result<()> {
        let ours = watch.stamp();
        for peer in self.peers() {
            let theirs = self.arena.seat(peer).postings.stamp(self.postings);
            if theirs != ours {
                return Err(watch.differs(self.ranks[peer], &theirs));
            }
        }
        Ok(())
    }

    /// Where a member said that its data lies.
    pub(crate) fn window(&self, member: usize) -> Window {
        self.arena.seat(member).postings.window(self.postings)
    }

    /// Begins a round: gives its number once our slot for it is free.
    pub(crate) fn begin(&mut self, stage: usize, watch: &Watch) -> Result<u64> {
        let number = self.rounds[stage];
        self.rounds[stage] += 1;
        for peer in self.peers() {
            let slots = SLOTS as u64;
            self.wait(peer, watch, |arena| {
                arena.seat(peer).stages[stage].has_freed(number, slots)
            })?;
        }
        Ok(number)
    }

    /// Our slot of a round, to be filled between `begin` and `fill`.
    pub(crate) fn own_slot(&self, stage: usize, number: u64) -> *mut u8 {
        self.arena.slot(stage, self.me, number)
    }

    /// Publishes our part of a round.
    pub(crate) fn fill(&self, stage: usize, number: u64) {
        self.arena.seat(self.me).stages[stage].fill(number);
        self.ring();
    }

    /// A peer's slot of a round, once it is filled; ours to read until `drain`.
    pub(crate) fn slot_of(
        &self,
        peer: usize,
        stage: usize,
        number: u64,
        watch: &Watch,
    ) -> Result<*const u8> {
        self.wait(peer, watch, |arena| arena.seat(peer).stages[stage].has_filled(number))?;
        Ok(self.arena.slot(stage, peer, number))
    }

    /// Says that we are done with everybody's slots of a round.
    pub(crate) fn drain(&self, stage: usize, number: u64) {
        self.arena.seat(self.me).stages[stage].drain(number);
        self.ring();
    }

    /// A round without data: returns when all members have come here.
    pub(crate) fn meet(&mut self, watch: &Watch) -> Result<()> {
        let number = self.begin(0, watch)?;
        self.fill(0, number);
        for peer in self.peers() {
            self.slot_of(peer, 0, number, watch)?;
        }
        self.drain(0, number);
        Ok(())
    }

    /// Says whether we touch the others' memory in place.
    pub(crate) fn reach(&self, reaching: bool) {
        let flag = &self.arena.seat(self.me).reaching;
        flag.store(u32::from(reaching), Ordering::Release);
        // Before we look whether the world stands: see `await_hands_off`.
        fence(Ordering::SeqCst);
    }

    /// For a call that fails: returns when no peer touches our memory any more. The world is broken by
    /// now, and who begins to reach after us sees that, so this takes as long as one copy; unless the
    /// peer is a process that was killed while it reached.
    pub(crate) fn await_hands_off(&self) {
        fence(Ordering::SeqCst);
        let until = Instant::now() + Duration::from_millis(300);
        for peer in self.peers() {
            let may_be_dead = self.window(peer).pid != std::process::id();
            let reaching = || self.arena.seat(peer).reaching.load(Ordering::Acquire) != 0;
            while reaching() && !(may_be_dead && Instant::now() > until) {
                std::thread::yield_now();
            }
        }
    }

    fn wait(&self, peer: usize, watch: &Watch, ready: impl Fn(&Arena) -> bool) -> Result<()> {
        let bell = &self.arena.seat(self.me).bell;
        watch.wait(self.ranks[peer], bell, || ready(&self.arena))
    }

    fn ring(&self) {
        for peer in self.peers() {
            self.arena.seat(peer).bell.ring();
        }
    }
}
