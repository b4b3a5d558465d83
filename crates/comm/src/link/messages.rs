//! Single messages between two members of a group, beside its collectives: each direction of each
//! pair is a line of its own, so a send never waits for a receive of the same rank.

use crate::call::error::Result;
use crate::group::track::Track;
use crate::health::watch::Watch;
use crate::link::socket::SocketReader;
use crate::link::sockets::{LaneKind, Sockets};
use crate::link::{BellRef, Inbox, Incoming, Outgoing, Rx, Tx, transfer};
use crate::memory::arena::Arena;
use crate::memory::bell::Bell;
use std::sync::Arc;

/// One end of a line over our own links; opened when it is first used.
pub(crate) struct End<L> {
    link: Option<L>,
    /// Keeps the memory of the link mapped, and holds the bells.
    arena: Arena,
    /// Seats of sender and receiver, if both are on this host.
    seats: Option<(usize, usize)>,
    own_seat: usize,
    peer: usize,
    group: u64,
    sockets: Option<Arc<Sockets>>,
}

/// The sending end of a line, whoever carries it.
pub(crate) enum SendEnd {
    Link(End<Tx>),
    #[cfg(feature = "mpi")]
    Mpi(Box<crate::mpi::Line>),
}

impl SendEnd {
    pub(crate) fn send(&mut self, watch: &Watch, bytes: &[u8]) -> Result<()> {
        match self {
            SendEnd::Link(end) => end.send(watch, bytes),
            #[cfg(feature = "mpi")]
            SendEnd::Mpi(line) => line.send(watch, bytes),
        }
    }
}

/// The receiving end of a line, whoever carries it.
pub(crate) enum ReceiveEnd {
    Link(End<Rx>),
    #[cfg(feature = "mpi")]
    Mpi(Box<crate::mpi::Line>),
}

impl ReceiveEnd {
    pub(crate) fn receive(&mut self, watch: &Watch, bytes: &mut [u8]) -> Result<()> {
        match self {
            ReceiveEnd::Link(end) => end.receive(watch, bytes),
            #[cfg(feature = "mpi")]
            ReceiveEnd::Mpi(line) => line.receive(watch, bytes),
        }
    }
}

pub(crate) type SendTrack = Arc<Track<SendEnd>>;
pub(crate) type ReceiveTrack = Arc<Track<ReceiveEnd>>;

/// All lines of one member: to and from each of the others (and itself).
pub(crate) struct Messages {
    pub to: Vec<SendTrack>,
    pub from: Vec<ReceiveTrack>,
}

pub(crate) struct MessageParts<'a> {
    pub group: u64,
    pub me: usize,
    pub members: &'a [usize],
    /// Seat of each member on our host.
    pub seats: &'a [Option<usize>],
    pub arena: &'a Arena,
    pub sockets: Option<&'a Arc<Sockets>>,
}

impl Messages {
    /// The lines whose ends these are, in the order of members.
    pub(crate) fn over(
        to: impl Iterator<Item = SendEnd>,
        from: impl Iterator<Item = ReceiveEnd>,
    ) -> Messages {
        Messages {
            to: to.map(|end| Arc::new(Track::new(end))).collect(),
            from: from.map(|end| Arc::new(Track::new(end))).collect(),
        }
    }

    pub(crate) fn new(parts: &MessageParts) -> Messages {
        let own_seat = parts.seats[parts.me].expect("we have a seat on our own host");
        let to = |m: usize| {
            SendEnd::Link(End {
                link: None,
                arena: parts.arena.clone(),
                seats: parts.seats[m].map(|seat| (own_seat, seat)),
                own_seat,
                peer: parts.members[m],
                group: parts.group,
                sockets: parts.sockets.cloned(),
            })
        };
        let from = |m: usize| {
            ReceiveEnd::Link(End {
                link: None,
                arena: parts.arena.clone(),
                seats: parts.seats[m].map(|seat| (seat, own_seat)),
                own_seat,
                peer: parts.members[m],
                group: parts.group,
                sockets: parts.sockets.cloned(),
            })
        };
        let members = 0..parts.members.len();
        Messages::over(members.clone().map(to), members.map(from))
    }
}

impl End<Tx> {
    pub(crate) fn send(&mut self, watch: &Watch, bytes: &[u8]) -> Result<()> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.open(watch)?,
        };
        let result = {
            let bell = self.bell(|door| &door.sender);
            let message = Outgoing::new(self.peer, &mut link, watch, bytes);
            transfer(watch, bell, Some(message), None)
        };
        self.link = Some(link);
        result
    }

    fn open(&self, watch: &Watch) -> Result<Tx> {
        if let Some((from, to)) = self.seats {
            // SAFETY: we keep the arena mapped for as long as the link.
            let bell = unsafe { BellRef::new(&self.arena.doorway(from, to).receiver) };
            return Ok(Tx::Shared { writer: self.arena.message_writer(from, to), bell });
        }
        let sockets = self.sockets.as_ref().expect("members of other hosts are reached by TCP");
        Ok(Tx::Socket(sockets.dial(self.peer, self.group, LaneKind::Message, watch)?))
    }
}

impl End<Rx> {
    pub(crate) fn receive(&mut self, watch: &Watch, bytes: &mut [u8]) -> Result<()> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => self.open(watch)?,
        };
        let result = {
            let bell = self.bell(|door| &door.receiver);
            let message = Incoming::new(self.peer, &mut link, Inbox::Into(bytes));
            transfer(watch, bell, None, Some(message))
        };
        self.link = Some(link);
        result
    }

    fn open(&self, watch: &Watch) -> Result<Rx> {
        if let Some((from, to)) = self.seats {
            // SAFETY: we keep the arena mapped for as long as the link.
            let bell = unsafe { BellRef::new(&self.arena.doorway(from, to).sender) };
            return Ok(Rx::Shared { reader: self.arena.message_reader(from, to), bell });
        }
        let sockets = self.sockets.as_ref().expect("members of other hosts are reached by TCP");
        let stream = sockets.arrival(self.peer, self.group, LaneKind::Message, watch)?;
        Ok(Rx::Socket(SocketReader::new(stream)))
    }
}

impl<L> End<L> {
    /// Our bell of the line; a link over TCP never rings one, so any will do there.
    fn bell(&self, side: impl Fn(&crate::memory::arena::Doorway) -> &Bell) -> &Bell {
        let (from, to) = self.seats.unwrap_or((self.own_seat, self.own_seat));
        side(self.arena.doorway(from, to))
    }
}
