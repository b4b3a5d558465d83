//! Layout of the shared memory of a group on one host: a block per member, channels between every two
//! members, and the slots of direct collectives. Only hands out the parts; they are used by
//! `lane::slots` and `link`.

use crate::memory::bell::Bell;
use crate::memory::channel::{CHANNEL_BYTES, Reader, Writer};
use crate::memory::member::{BANKS, Bank, MemberBlock, SLOT_BYTES, SLOTS};
use crate::memory::segment::{Address, Offer, Segment};
use crate::memory::sync::AtomicU64;
use std::io;
use std::sync::Arc;

/// The two bells of a channel for point-to-point messages, which any thread may use concurrently with a
/// collective.
#[repr(C, align(128))]
pub(crate) struct MessageBells {
    pub sender: Bell,
    /// Messages in device memory that the receiver has taken.
    pub taken: AtomicU64,
    _padding: [u8; 112],
    pub receiver: Bell,
}

/// Shared memory of a group on one host.
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

    pub(crate) fn member(&self, member: usize) -> &MemberBlock {
        assert!(member < self.members);
        // SAFETY: the arena begins with the member blocks; they consist of atomics that may be zero.
        unsafe { self.segment.shared(member * size_of::<MemberBlock>()) }
    }

    /// Slot `round % SLOTS` of a member, `SLOT_BYTES` long.
    pub(crate) fn slot(&self, bank: Bank, member: usize, round: u64) -> *mut u8 {
        let index =
            (bank as usize * self.members + member) * SLOTS + (round % SLOTS as u64) as usize;
        self.segment.at(Layout::of(self.members).slots + index * SLOT_BYTES)
    }

    /// Sending end of the channel for collectives between two members. Call once per channel.
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

    /// Sending end of the channel for point-to-point messages between two members.
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

    pub(crate) fn message_bells(&self, from: usize, to: usize) -> &MessageBells {
        let at = Layout::of(self.members).bells + self.pair(from, to) * size_of::<MessageBells>();
        // SAFETY: inside the segment; atomics that may be zero.
        unsafe { self.segment.shared(at) }
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        assert!(from < self.members && to < self.members);
        from * self.members + to
    }
}

struct Layout {
    bells: usize,
    channels: usize,
    messages: usize,
    slots: usize,
    total: usize,
}

impl Layout {
    fn of(members: usize) -> Layout {
        let page = |n: usize| n.next_multiple_of(4096);
        let pairs = members * members;
        let bells = page(members * size_of::<MemberBlock>());
        let channels = page(bells + pairs * size_of::<MessageBells>());
        let messages = page(channels + pairs * CHANNEL_BYTES);
        let slots = page(messages + pairs * CHANNEL_BYTES);
        let total = slots + BANKS * members * SLOTS * SLOT_BYTES;
        Layout { bells, channels, messages, slots, total }
    }
}
