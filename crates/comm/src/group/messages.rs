//! Point-to-point messages between members of a group, independent of its collectives: each direction of
//! each pair has its own track, so a send never waits for a receive of the same rank.

use crate::call::error::Result;
use crate::group::track::Track;
use crate::health::watch::Watch;
use crate::link::socket::SocketReader;
use crate::link::sockets::{LaneKind, Sockets};
use crate::link::{BellRef, Inbox, Incoming, Outgoing, Rx, Tx, transfer};
use crate::memory::arena::{Arena, MessageBells};
use crate::memory::bell::Bell;
use crate::memory::sync::Ordering;
use std::sync::Arc;

/// One end of a connection over our own links; opened on first use.
pub(crate) struct End<L> {
    link: Option<L>,
    /// Keeps the memory of the link mapped, and contains the bells.
    arena: Arena,
    /// Local indices of sender and receiver, if both are on this host.
    local: Option<(usize, usize)>,
    own_index: usize,
    peer: usize,
    group: u64,
    sockets: Option<Arc<Sockets>>,
    /// Messages in device memory that were sent so far.
    offered: u64,
}

/// Sending end, on any backend.
pub(crate) enum SendEnd {
    Link(End<Tx>),
    #[cfg(feature = "mpi")]
    Mpi(Box<crate::mpi::Channel>),
}

impl SendEnd {
    pub(crate) fn send(&mut self, watch: &Watch, bytes: &[u8]) -> Result<()> {
        match self {
            SendEnd::Link(end) => end.send(watch, bytes),
            #[cfg(feature = "mpi")]
            SendEnd::Mpi(channel) => channel.send(watch, bytes),
        }
    }
}

impl SendEnd {
    /// Our own link, which messages on device memory use too.
    pub(crate) fn link(&mut self) -> &mut End<Tx> {
        match self {
            SendEnd::Link(end) => end,
            #[cfg(feature = "mpi")]
            SendEnd::Mpi(_) => unreachable!("a group over MPI has no links"),
        }
    }

    /// The channel of a group over MPI.
    #[cfg(feature = "mpi")]
    pub(crate) fn mpi(&mut self) -> &mut crate::mpi::Channel {
        match self {
            SendEnd::Link(_) => unreachable!("MPI does not carry the group"),
            SendEnd::Mpi(channel) => channel,
        }
    }
}

/// Receiving end, on any backend.
pub(crate) enum ReceiveEnd {
    Link(End<Rx>),
    #[cfg(feature = "mpi")]
    Mpi(Box<crate::mpi::Channel>),
}

impl ReceiveEnd {
    pub(crate) fn receive(&mut self, watch: &Watch, bytes: &mut [u8]) -> Result<()> {
        match self {
            ReceiveEnd::Link(end) => end.receive(watch, bytes),
            #[cfg(feature = "mpi")]
            ReceiveEnd::Mpi(channel) => channel.receive(watch, bytes),
        }
    }
}

impl ReceiveEnd {
    /// Our own link, which messages on device memory use too.
    pub(crate) fn link(&mut self) -> &mut End<Rx> {
        match self {
            ReceiveEnd::Link(end) => end,
            #[cfg(feature = "mpi")]
            ReceiveEnd::Mpi(_) => unreachable!("a group over MPI has no links"),
        }
    }

    /// The channel of a group over MPI.
    #[cfg(feature = "mpi")]
    pub(crate) fn mpi(&mut self) -> &mut crate::mpi::Channel {
        match self {
            ReceiveEnd::Link(_) => unreachable!("MPI does not carry the group"),
            ReceiveEnd::Mpi(channel) => channel,
        }
    }
}

pub(crate) type SendTrack = Arc<Track<SendEnd>>;
pub(crate) type ReceiveTrack = Arc<Track<ReceiveEnd>>;

/// All connections of one member: to and from each member, including itself.
pub(crate) struct Messages {
    pub to: Vec<SendTrack>,
    pub from: Vec<ReceiveTrack>,
}

pub(crate) struct MessageParts<'a> {
    pub group: u64,
    pub me: usize,
    pub members: &'a [usize],
    /// Index of each member among those of our host, if it is on our host.
    pub local_indices: &'a [Option<usize>],
    pub arena: &'a Arena,
    pub sockets: Option<&'a Arc<Sockets>>,
}

impl Messages {
    /// Connections with these ends, in member order.
    pub(crate) fn new(
        to: impl Iterator<Item = SendEnd>,
        from: impl Iterator<Item = ReceiveEnd>,
    ) -> Messages {
        Messages {
            to: to.map(|end| Arc::new(Track::new(end))).collect(),
            from: from.map(|end| Arc::new(Track::new(end))).collect(),
        }
    }

    pub(crate) fn over_links(parts: &MessageParts) -> Messages {
        let own_index = parts.local_indices[parts.me].expect("we are on our own host");
        let to = |m: usize| {
            SendEnd::Link(End {
                link: None,
                arena: parts.arena.clone(),
                local: parts.local_indices[m].map(|index| (own_index, index)),
                own_index,
                peer: parts.members[m],
                group: parts.group,
                sockets: parts.sockets.cloned(),
                offered: 0,
            })
        };
        let from = |m: usize| {
            ReceiveEnd::Link(End {
                link: None,
                arena: parts.arena.clone(),
                local: parts.local_indices[m].map(|index| (index, own_index)),
                own_index,
                peer: parts.members[m],
                group: parts.group,
                sockets: parts.sockets.cloned(),
                offered: 0,
            })
        };
        let members = 0..parts.members.len();
        Messages::new(members.clone().map(to), members.map(from))
    }
}

impl End<Tx> {
    pub(crate) fn send(&mut self, watch: &Watch, bytes: &[u8]) -> Result<()> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.open(watch)?,
        };
        let result = {
            let bell = self.bell(|bells| &bells.sender);
            let message = Outgoing::new(self.peer, &mut link, watch, bytes);
            transfer(watch, bell, Some(message), None)
        };
        self.link = Some(link);
        result
    }

    fn open(&self, watch: &Watch) -> Result<Tx> {
        if let Some((from, to)) = self.local {
            // SAFETY: we keep the arena mapped for as long as the link.
            let bell = unsafe { BellRef::new(&self.arena.message_bells(from, to).receiver) };
            return Ok(Tx::Shared { writer: self.arena.message_writer(from, to), bell });
        }
        let sockets = self.sockets.as_ref().expect("members of other hosts are connected by TCP");
        Ok(Tx::Socket(sockets.dial(self.peer, self.group, LaneKind::Message, watch)?.writer))
    }
}

impl End<Rx> {
    pub(crate) fn receive(&mut self, watch: &Watch, bytes: &mut [u8]) -> Result<()> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.open(watch)?,
        };
        let result = {
            let bell = self.bell(|bells| &bells.receiver);
            let message = Incoming::new(self.peer, &mut link, Inbox::Into(bytes));
            transfer(watch, bell, None, Some(message))
        };
        self.link = Some(link);
        result
    }

    fn open(&self, watch: &Watch) -> Result<Rx> {
        if let Some((from, to)) = self.local {
            // SAFETY: we keep the arena mapped for as long as the link.
            let bell = unsafe { BellRef::new(&self.arena.message_bells(from, to).sender) };
            return Ok(Rx::Shared { reader: self.arena.message_reader(from, to), bell });
        }
        let sockets = self.sockets.as_ref().expect("members of other hosts are connected by TCP");
        let stream = sockets.accept(self.peer, self.group, LaneKind::Message, watch)?;
        Ok(Rx::Socket(SocketReader::new(stream)))
    }
}

impl End<Tx> {
    /// Waits until the receiver has taken all messages in device memory.
    pub(crate) fn wait_until_taken(&mut self, watch: &Watch) -> Result<()> {
        let (from, to) = self.local.expect("device messages stay on one host");
        self.offered += 1;
        let (bells, count) = (self.arena.message_bells(from, to), self.offered);
        watch.wait(self.peer, &bells.sender, || bells.taken.load(Ordering::Acquire) >= count)
    }
}

impl End<Rx> {
    /// Tells the sender that its message in device memory was taken.
    pub(crate) fn take(&self) {
        let (from, to) = self.local.expect("device messages stay on one host");
        let bells = self.arena.message_bells(from, to);
        bells.taken.fetch_add(1, Ordering::Release);
        bells.sender.ring();
    }
}

impl<L> End<L> {
    /// Our bell of the connection. A TCP link never rings one, so any bell will do there.
    fn bell(&self, side: impl Fn(&MessageBells) -> &Bell) -> &Bell {
        let (from, to) = self.local.unwrap_or((self.own_index, self.own_index));
        side(self.arena.message_bells(from, to))
    }
}
