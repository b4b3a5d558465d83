//! The shared memory of a group on one host: a seat per member with its bell and its counters, the
//! channels between every two members, and the slots through which data is passed on directly.
//! Only lays it out and hands out the parts; what the parts are used for is told in `stage` and `link`.

use crate::memory::bell::Bell;
use crate::memory::channel::{CHANNEL_BYTES, Reader, Writer};
use crate::memory::segment::{Address, Offer, Segment};
use crate::memory::stage::{Counters, Postings, SLOT_BYTES, SLOTS, STAGES};
use crate::memory::sync::AtomicU32;
use std::io;
use std::sync::Arc;

#[repr(C, align(128))]
pub(crate) struct Seat {
    /// Rung when something has happened that this member may wait for in a collective.
    pub bell: Bell,
    pub stages: [Counters; STAGES],
    /// Whether this member touches the others' memory in place.
    pub reaching: AtomicU32,
    /// What this member calls.
    pub postings: Postings,
}

#[cfg(all(loom, test))]
impl Seat {
    pub(crate) fn new() -> Seat {
        let stages = [(); STAGES].map(|()| Counters::new());
        let reaching = AtomicU32::new(0);
        Seat { bell: Bell::new(), stages, reaching, postings: Postings::new() }
    }
}

/// The two bells of a channel for single messages, which any thread may use beside a collective.
#[repr(C, align(128))]
pub(crate) struct Doorway {
    pub sender: Bell,
    _apart: [u8; 120],
    pub receiver: Bell,
}

/// What all ranks of a host see of a group.
#[derive(Clone)]
pub(crate) struct Arena {
    segment: Arc<Segment>,
    members: usize,
}

impl Arena {
    pub(crate) fn create(members: usize) -> io::Result<(Arena, Offer)> {
        let (segment, offer) = Segment::create(Layout::of(members).total)?;
        Ok((Arena { segment: Arc::new(segment), members }, offer))
    }

    pub(crate) fn open(address: Address, members: usize) -> io::Result<Arena> {
        let segment = Segment::open(address, Layout::of(members).total)?;
        Ok(Arena { segment: Arc::new(segment), members })
    }

    pub(crate) fn members(&self) -> usize {
        self.members
    }

    pub(crate) fn seat(&self, member: usize) -> &Seat {
        assert!(member < self.members);
        // SAFETY: the arena begins with its seats; they are atomics that may be zero.
        unsafe { self.segment.shared(member * size_of::<Seat>()) }
    }

    /// Slot `number % SLOTS` of a member, `SLOT_BYTES` long.
    pub(crate) fn slot(&self, stage: usize, member: usize, number: u64) -> *mut u8 {
        let index = (stage * self.members + member) * SLOTS + (number % SLOTS as u64) as usize;
        self.segment.at(Layout::of(self.members).slots + index * SLOT_BYTES)
    }

    /// The channel for collectives from one member to another. Takes each end once.
    pub(crate) fn writer(&self, from: usize, to: usize) -> Writer {
        let at = Layout::of(self.members).channels + self.pair(from, to) * CHANNEL_BYTES;
        // SAFETY: inside the segment, which the group keeps mapped for longer than its lanes.
        unsafe { Writer::new(self.segment.at(at)) }
    }

    pub(crate) fn reader(&self, from: usize, to: usize) -> Reader {
        let at = Layout::of(self.members).channels + self.pair(from, to) * CHANNEL_BYTES;
        // SAFETY: as above.
        unsafe { Reader::new(self.segment.at(at)) }
    }

    /// The channel for single messages from one member to another.
    pub(crate) fn message_writer(&self, from: usize, to: usize) -> Writer {
        let at = Layout::of(self.members).messages + self.pair(from, to) * CHANNEL_BYTES;
        // SAFETY: as above.
        unsafe { Writer::new(self.segment.at(at)) }
    }

    pub(crate) fn message_reader(&self, from: usize, to: usize) -> Reader {
        let at = Layout::of(self.members).messages + self.pair(from, to) * CHANNEL_BYTES;
        // SAFETY: as above.
        unsafe { Reader::new(self.segment.at(at)) }
    }

    pub(crate) fn doorway(&self, from: usize, to: usize) -> &Doorway {
        let at = Layout::of(self.members).doorways + self.pair(from, to) * size_of::<Doorway>();
        // SAFETY: inside the segment; atomics that may be zero.
        unsafe { self.segment.shared(at) }
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        assert!(from < self.members && to < self.members);
        from * self.members + to
    }
}

struct Layout {
    doorways: usize,
    channels: usize,
    messages: usize,
    slots: usize,
    total: usize,
}

impl Layout {
    fn of(members: usize) -> Layout {
        let page = |n: usize| n.next_multiple_of(4096);
        let pairs = members * members;
        let doorways = page(members * size_of::<Seat>());
        let channels = page(doorways + pairs * size_of::<Doorway>());
        let messages = page(channels + pairs * CHANNEL_BYTES);
        let slots = page(messages + pairs * CHANNEL_BYTES);
        let total = slots + STAGES * members * SLOTS * SLOT_BYTES;
        Layout { doorways, channels, messages, slots, total }
    }
}
