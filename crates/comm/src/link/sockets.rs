//! The one-way TCP links between ranks of different hosts: who sends, dials; who receives waits for
//! the arrival. Every link is proven by handshake before it is handed out.

use crate::call::error::{Error, Result};
use crate::health::watch::Watch;
use crate::link::socket;
use crate::wire::{self, ConnectError, Expect, Hello, ListenerHandle, Purpose, Secret};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// What a link of a group carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub(crate) enum LaneKind {
    Collective = 0,
    Message = 1,
}

/// Who we are towards other ranks, equal on all connections of a job.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub secret: Secret,
    pub generation: u32,
    pub config: [u8; 32],
    pub rank: u32,
}

impl Credentials {
    pub(crate) fn expect(&self) -> Expect {
        Expect {
            version: wire::PROTOCOL,
            generation: self.generation,
            config: self.config,
            rank: self.rank,
        }
    }

    pub(crate) fn hello(&self, to: usize, purpose: Purpose) -> Hello {
        Hello {
            version: wire::PROTOCOL,
            generation: self.generation,
            config: self.config,
            from: self.rank,
            to: to as u32,
            purpose,
        }
    }
}

/// Links that peers have dialled and nobody has asked for yet: (from, group, lane).
type Arrivals = HashMap<(u32, u64, u32), TcpStream>;

#[derive(Default)]
pub(crate) struct Hall {
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
}

impl Hall {
    /// Takes in a proven link.
    pub(crate) fn admit(&self, hello: &Hello, stream: TcpStream) {
        let Purpose::Link { group, lane } = hello.purpose else {
            tracing::warn!("rank {} dialled a link port for control; dropped", hello.from);
            return;
        };
        let mut arrivals = self.arrivals.lock().unwrap_or_else(|e| e.into_inner());
        arrivals.insert((hello.from, group, lane), stream);
        self.changed.notify_all();
    }
}

pub(crate) struct Sockets {
    credentials: Credentials,
    /// Where each world rank listens.
    addresses: Vec<SocketAddr>,
    hall: Arc<Hall>,
    /// Keeps the listener going.
    _listener: ListenerHandle,
}

impl Sockets {
    pub(crate) fn new(
        credentials: Credentials,
        addresses: Vec<SocketAddr>,
        hall: Arc<Hall>,
        listener: ListenerHandle,
    ) -> Sockets {
        Sockets { credentials, addresses, hall, _listener: listener }
    }

    /// Opens the link to a world rank.
    pub(crate) fn dial(
        &self,
        to: usize,
        group: u64,
        lane: LaneKind,
        watch: &Watch,
    ) -> Result<TcpStream> {
        let hello = self.credentials.hello(to, Purpose::Link { group, lane: lane as u32 });
        let secret = &self.credentials.secret;
        watch.waiting_for(Some(to));
        // In slices, so that a world that breaks meanwhile is noticed.
        loop {
            watch.check(to)?;
            let deadline = std::time::Instant::now() + Duration::from_millis(500);
            match wire::connect(self.addresses[to], &hello, secret, deadline) {
                Ok(stream) => {
                    watch.waiting_for(None);
                    return self.ready(stream);
                }
                Err(ConnectError::Deadline { .. }) => {}
                // A rank that goes because the world broke turns callers away as well.
                Err(error) => return Err(watch.lost(to, &error)),
            }
        }
    }

    /// Waits for the link that a world rank dials to us.
    pub(crate) fn arrival(
        &self,
        from: usize,
        group: u64,
        lane: LaneKind,
        watch: &Watch,
    ) -> Result<TcpStream> {
        let key = (from as u32, group, lane as u32);
        watch.waiting_for(Some(from));
        let mut arrivals = self.hall.arrivals.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            if let Some(stream) = arrivals.remove(&key) {
                watch.waiting_for(None);
                return self.ready(stream);
            }
            watch.check(from)?;
            let waited = self.hall.changed.wait_timeout(arrivals, crate::health::watch::SLICE);
            arrivals = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn ready(&self, stream: TcpStream) -> Result<TcpStream> {
        let rank = self.credentials.rank as usize;
        socket::prepare(&stream).map_err(|e| Error::system(rank, "preparing a connection", e))?;
        Ok(stream)
    }
}
