//! Shared state of one member of a group on one host: its bell, the counters of its slots, and the
//! postings by which members compare their calls. Only the layout and the rules of single fields; the
//! protocol over all members is in `lane::slots`.

use crate::call::Stamp;
use crate::memory::bell::Bell;
use crate::memory::sync::{AtomicU32, AtomicU64, Ordering};

/// Rounds that may be in flight at a time.
pub(crate) const SLOTS: usize = 4;
/// Bytes that a member can pass on in one round.
pub(crate) const SLOT_BYTES: usize = 256 << 10;
/// Number of slot banks; see [`Bank`].
pub(crate) const BANKS: usize = 2;

/// The two independent sets of slots of a member.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bank {
    Inputs = 0,
    Results = 1,
}

#[repr(C, align(128))]
pub(crate) struct MemberBlock {
    /// Rung after every event that this member may wait for in a collective.
    pub bell: Bell,
    pub counters: [Counters; BANKS],
    /// Whether this member is accessing the others' memory in place.
    pub accessing: AtomicU32,
    /// The calls of this member.
    pub postings: Postings,
}

#[cfg(all(loom, test))]
impl MemberBlock {
    pub(crate) fn new() -> MemberBlock {
        let counters = [(); BANKS].map(|()| Counters::new());
        let accessing = AtomicU32::new(0);
        MemberBlock { bell: Bell::new(), counters, accessing, postings: Postings::new() }
    }
}

/// Number of slots that a member has filled, and number of rounds of the others that it has drained.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Counters {
    filled: AtomicU64,
    _padding: [u8; 56],
    drained: AtomicU64,
}

impl Counters {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Counters {
        Counters { filled: AtomicU64::new(0), _padding: [0; 56], drained: AtomicU64::new(0) }
    }

    /// Whether this member has filled its slot of a round, which may then be read.
    pub(crate) fn has_filled(&self, round: u64) -> bool {
        self.filled.load(Ordering::Acquire) > round
    }

    /// Whether this member has drained the earlier round that used the same one of `slots` slots.
    pub(crate) fn has_freed(&self, round: u64, slots: u64) -> bool {
        round < slots || self.drained.load(Ordering::Acquire) > round - slots
    }

    pub(crate) fn fill(&self, round: u64) {
        self.filled.store(round + 1, Ordering::Release);
    }

    pub(crate) fn drain(&self, round: u64) {
        self.drained.store(round + 1, Ordering::Release);
    }
}

/// Call and buffer location of a member for the current direct operation and the previous one, by
/// parity. Two postings suffice because every direct operation contains one barrier after the
/// announcement: a member that announces operation n+2 has seen all members in n+1, so all have
/// finished reading the announcements of n.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Postings([Posting; 2]);

#[derive(Debug)]
#[repr(C, align(64))]
struct Posting {
    stamp: [AtomicU64; 6],
    location: [AtomicU64; 3],
}

impl Postings {
    #[cfg(all(loom, test))]
    pub(crate) fn new() -> Postings {
        let zero = |_| AtomicU64::new(0);
        let posting = || Posting { stamp: [0; 6].map(zero), location: [0; 3].map(zero) };
        Postings([posting(), posting()])
    }

    fn of(&self, number: u64) -> &Posting {
        &self.0[(number % 2) as usize]
    }

    /// Becomes visible to the others with the next `fill`.
    pub(crate) fn announce(&self, number: u64, stamp: Stamp, location: BufferLocation) {
        let posting = self.of(number);
        for (word, value) in posting.stamp.iter().zip(stamp) {
            word.store(value, Ordering::Relaxed);
        }
        let packed = u64::from(location.pid) << 32 | u64::from(location.allocation);
        posting.location[0].store(packed, Ordering::Relaxed);
        posting.location[1].store(location.address, Ordering::Relaxed);
        posting.location[2].store(location.offset, Ordering::Relaxed);
    }

    pub(crate) fn stamp(&self, number: u64) -> Stamp {
        std::array::from_fn(|i| self.of(number).stamp[i].load(Ordering::Relaxed))
    }

    pub(crate) fn location(&self, number: u64) -> BufferLocation {
        let posting = self.of(number);
        let packed = posting.location[0].load(Ordering::Relaxed);
        BufferLocation {
            pid: (packed >> 32) as u32,
            allocation: packed as u32,
            address: posting.location[1].load(Ordering::Relaxed),
            offset: posting.location[2].load(Ordering::Relaxed),
        }
    }
}

/// Location of a member's buffer, for peers that may be able to access it in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferLocation {
    pub pid: u32,
    /// Id of the symmetric allocation that contains the buffer, or 0.
    pub allocation: u32,
    /// Address in the owner's process.
    pub address: u64,
    /// Offset in the symmetric allocation.
    pub offset: u64,
}
