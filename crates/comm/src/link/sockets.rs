//! One-way TCP links between ranks of different hosts: the sender dials, the receiver waits for the
//! connection. Every link is authenticated by a handshake before use.

use crate::call::error::{Error, Result};
use crate::health::watch::Watch;
use crate::link::socket;
use crate::wire::{
    self, ConnectError, Expect, Hello, ListenerHandle, Purpose, Route, Secret, Stream,
};
use crate::world::identity::Transport;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};

/// Use of a link of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum LaneKind {
    Collective = 0,
    Message = 1,
}

/// Identity of a rank in handshakes, equal on all connections of a job.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub secret: Secret,
    pub generation: u32,
    pub config: [u8; 32],
    pub rank: u32,
    pub transport: Transport,
}

impl Credentials {
    fn version(&self) -> u32 {
        if self.transport.encrypt { wire::PROTOCOL | wire::ENCRYPTED } else { wire::PROTOCOL }
    }

    /// The way to a rank that listens at `addr`.
    pub(crate) fn route(&self, addr: SocketAddr) -> Route {
        Route { addr, socks5: self.transport.socks5 }
    }

    pub(crate) fn expect(&self) -> Expect {
        Expect {
            version: self.version(),
            generation: self.generation,
            config: self.config,
            rank: self.rank,
        }
    }

    pub(crate) fn hello(&self, to: usize, purpose: Purpose) -> Hello {
        Hello {
            version: self.version(),
            generation: self.generation,
            config: self.config,
            from: self.rank,
            to: to as u32,
            purpose,
        }
    }
}

/// Accepted links by (from, group, lane).
type Links = HashMap<(u32, u64, u32), Stream>;

/// Links that peers have opened and that no call has used yet.
#[derive(Default)]
pub(crate) struct PendingConnections {
    links: Mutex<Links>,
    changed: Condvar,
}

impl PendingConnections {
    /// Adds an authenticated link.
    pub(crate) fn add(&self, hello: &Hello, stream: Stream) {
        let Purpose::Link { group, lane } = hello.purpose else {
            tracing::warn!(
                "rank {} opened a control connection on the port for links; closed it",
                hello.from
            );
            return;
        };
        let mut links = self.links.lock().unwrap_or_else(|e| e.into_inner());
        links.insert((hello.from, group, lane), stream);
        self.changed.notify_all();
    }
}

pub(crate) struct Sockets {
    credentials: Credentials,
    /// Address of each world rank.
    addresses: Vec<SocketAddr>,
    pending: Arc<PendingConnections>,
    /// Keeps the listener running.
    _listener: ListenerHandle,
}

impl Sockets {
    pub(crate) fn new(
        credentials: Credentials,
        addresses: Vec<SocketAddr>,
        pending: Arc<PendingConnections>,
        listener: ListenerHandle,
    ) -> Sockets {
        Sockets { credentials, addresses, pending, _listener: listener }
    }

    /// Opens the link to a world rank.
    pub(crate) fn dial(
        &self,
        to: usize,
        group: u64,
        lane: LaneKind,
        watch: &Watch,
    ) -> Result<Stream> {
        let hello = self.credentials.hello(to, Purpose::Link { group, lane: lane as u32 });
        let (route, secret) =
            (self.credentials.route(self.addresses[to]), &self.credentials.secret);
        watch.connecting_to(to);
        let check = || watch.check_peer(to);
        match wire::connect_while(route, &hello, secret, watch.deadline(), check)? {
            Ok(stream) => {
                watch.waiting_for(None);
                self.ready(stream)
            }
            Err(error @ ConnectError::Deadline { .. }) => Err(watch.unreachable(to, &error)),
            // A rank that leaves a broken world refuses connections as well.
            Err(error) => Err(watch.lost(to, &error)),
        }
    }

    /// Waits for the link from a world rank.
    pub(crate) fn accept(
        &self,
        from: usize,
        group: u64,
        lane: LaneKind,
        watch: &Watch,
    ) -> Result<Stream> {
        let key = (from as u32, group, lane as u32);
        watch.waiting_for(Some(from));
        let mut links = self.pending.links.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            if let Some(stream) = links.remove(&key) {
                watch.waiting_for(None);
                return self.ready(stream);
            }
            watch.check(from)?;
            let waited = self.pending.changed.wait_timeout(links, crate::health::watch::SLICE);
            links = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn ready(&self, stream: Stream) -> Result<Stream> {
        let rank = self.credentials.rank as usize;
        socket::prepare(stream.tcp())
            .map_err(|e| Error::system(rank, "preparing a connection", e))?;
        Ok(stream)
    }
}
