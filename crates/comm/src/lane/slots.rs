//! Passes data through memory that all members of a group on one host have mapped: numbered slots that
//! their owner fills and the others drain, and the comparison of calls before anybody touches data.
//! Knows nothing about the collectives built on it: see `algo::direct`.
//!
//! Each member counts, for each bank, how many slots it has *filled* and how many of the others' rounds
//! it has *drained*. All members go through the same rounds, so the counters are comparable: round `n`
//! may be read when its owner's `filled` has passed `n`, and its slot may be written again when all
//! members' `drained` have passed `n`.

use crate::call::error::Result;
use crate::health::watch::Watch;
use crate::memory::arena::Arena;
use crate::memory::member::{BANKS, Bank, BufferLocation, SLOTS};
use crate::memory::sync::{Ordering, fence};
use std::time::{Duration, Instant};

/// One member's view of the slots.
pub(crate) struct Slots {
    arena: Arena,
    /// Our index among the local members.
    pub me: usize,
    /// World ranks of the local members.
    pub ranks: Vec<usize>,
    /// Rounds begun in each bank, equal on all members.
    rounds: [u64; BANKS],
    postings: u64,
}

impl Slots {
    pub(crate) fn new(arena: Arena, me: usize, ranks: Vec<usize>) -> Slots {
        assert_eq!(arena.members(), ranks.len());
        Slots { arena, me, ranks, rounds: [0; BANKS], postings: 0 }
    }

    pub(crate) fn members(&self) -> usize {
        self.ranks.len()
    }

    /// The other local members, starting with the next one, so that not all read the same memory first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, n) = (self.me, self.ranks.len());
        (1..n).map(move |i| (me + i) % n)
    }

    /// Posts our call and the location of our buffer; visible to the others with the next `fill`.
    pub(crate) fn announce(&mut self, watch: &Watch, location: BufferLocation) {
        self.postings += 1;
        self.arena.member(self.me).postings.announce(self.postings, watch.stamp(), location);
    }

    /// Fails on all members if a peer announced a different call than we did.
    pub(crate) fn compare(&self, watch: &Watch) -> Result<()> {
        let ours = watch.stamp();
        for peer in self.peers() {
            let theirs = self.arena.member(peer).postings.stamp(self.postings);
            if theirs != ours {
                return Err(watch.differs(self.ranks[peer], &theirs));
            }
        }
        Ok(())
    }

    /// The buffer location that a member announced.
    pub(crate) fn location(&self, member: usize) -> BufferLocation {
        self.arena.member(member).postings.location(self.postings)
    }

    /// Begins a round: waits until our slot is free and returns the number of the round.
    pub(crate) fn begin(&mut self, bank: Bank, watch: &Watch) -> Result<u64> {
        let round = self.rounds[bank as usize];
        self.rounds[bank as usize] += 1;
        for peer in self.peers() {
            self.wait(peer, watch, |arena| {
                arena.member(peer).counters[bank as usize].has_freed(round, SLOTS as u64)
            })?;
        }
        Ok(round)
    }

    /// Our slot of a round, to be written between `begin` and `fill`.
    pub(crate) fn own_slot(&self, bank: Bank, round: u64) -> *mut u8 {
        self.arena.slot(bank, self.me, round)
    }

    /// Publishes our slot of a round.
    pub(crate) fn fill(&self, bank: Bank, round: u64) {
        self.arena.member(self.me).counters[bank as usize].fill(round);
        self.ring();
    }

    /// Waits until a peer has filled its slot of a round. The slot may be read until `drain`.
    pub(crate) fn peer_slot(
        &self,
        peer: usize,
        bank: Bank,
        round: u64,
        watch: &Watch,
    ) -> Result<*const u8> {
        let filled = |arena: &Arena| arena.member(peer).counters[bank as usize].has_filled(round);
        self.wait(peer, watch, filled)?;
        Ok(self.arena.slot(bank, peer, round))
    }

    /// Releases all members' slots of a round.
    pub(crate) fn drain(&self, bank: Bank, round: u64) {
        self.arena.member(self.me).counters[bank as usize].drain(round);
        self.ring();
    }

    /// A round without data: returns when all members have entered it.
    pub(crate) fn barrier(&mut self, watch: &Watch) -> Result<()> {
        let round = self.begin(Bank::Inputs, watch)?;
        self.fill(Bank::Inputs, round);
        for peer in self.peers() {
            self.peer_slot(peer, Bank::Inputs, round, watch)?;
        }
        self.drain(Bank::Inputs, round);
        Ok(())
    }

    /// Publishes whether we access the others' memory in place.
    pub(crate) fn set_accessing(&self, accessing: bool) {
        let flag = &self.arena.member(self.me).accessing;
        flag.store(u32::from(accessing), Ordering::Release);
        // Must precede our check for a broken world: see `wait_until_not_accessed`.
        fence(Ordering::SeqCst);
    }

    /// For a call that fails: returns when no peer accesses our memory any more. The world is already
    /// broken, and a peer that starts an access after us sees that, so this takes no longer than one
    /// copy. A process that was killed during an access never clears its flag, hence the limit.
    pub(crate) fn wait_until_not_accessed(&self) {
        fence(Ordering::SeqCst);
        let until = Instant::now() + Duration::from_millis(300);
        for peer in self.peers() {
            let may_be_dead = self.location(peer).pid != std::process::id();
            let accessing = || self.arena.member(peer).accessing.load(Ordering::Acquire) != 0;
            while accessing() && !(may_be_dead && Instant::now() > until) {
                std::thread::yield_now();
            }
        }
    }

    fn wait(&self, peer: usize, watch: &Watch, ready: impl Fn(&Arena) -> bool) -> Result<()> {
        let bell = &self.arena.member(self.me).bell;
        watch.wait(self.ranks[peer], bell, || ready(&self.arena))
    }

    fn ring(&self) {
        for peer in self.peers() {
            self.arena.member(peer).bell.ring();
        }
    }
}
