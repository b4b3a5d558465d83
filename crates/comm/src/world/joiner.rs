//! A rank that is joining a world: its identity, options and deadline, and the addresses it uses.

use crate::call::error::{Error, Result};
use crate::wire::Listener;
use crate::world::address::{listen_ip, local_ip_towards};
use crate::world::identity::Identity;
use crate::world::inherited::inherited_listener;
use crate::world::options::Options;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

pub(crate) struct Joiner<'a> {
    pub identity: &'a Identity,
    pub options: &'a Options,
    pub deadline: Instant,
}

impl Joiner<'_> {
    pub(crate) fn error(&self, what: impl Into<String>) -> Error {
        Error::Join { rank: self.identity.rank, what: what.into() }
    }

    pub(crate) fn system(&self, doing: &str, source: std::io::Error) -> Error {
        Error::system(self.identity.rank, doing, source)
    }

    pub(crate) fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Limits reads and writes to the time that is left.
    pub(crate) fn limit(&self, stream: &TcpStream) -> std::io::Result<()> {
        let left = self.time_left().max(Duration::from_millis(10));
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))
    }

    /// Address of rank 0.
    pub(crate) fn master(&self) -> Result<SocketAddr> {
        let (host, port) = (self.identity.master_addr.as_str(), self.identity.master_port);
        let found = (host, port).to_socket_addrs().map(|mut all| all.next());
        match found {
            Ok(Some(address)) => Ok(address),
            Ok(None) => Err(self.error(format!("MASTER_ADDR={host} has no address"))),
            Err(e) => Err(self.error(format!("MASTER_ADDR={host} cannot be resolved: {e}"))),
        }
    }

    /// Address at which other ranks reach this one: as configured, or the local address of a route to
    /// the master. So a world on the loopback address stays there.
    pub(crate) fn own_ip(&self) -> Result<IpAddr> {
        if let Some(ip) = self.identity.bind {
            return Ok(ip);
        }
        let master = self.master()?;
        local_ip_towards(master)
            .map_err(|e| self.system(&format!("finding a route to {master}"), e))
    }

    /// Rank 0: listens on the master port.
    pub(crate) fn listen_on_master_port(&self) -> Result<Listener> {
        let listener = match self.identity.listener_fd {
            Some(fd) => {
                let inherited = inherited_listener(fd)
                    .map_err(|e| self.system("taking over the launcher's socket", e))?;
                Listener::from_std(inherited)
            }
            None => {
                let host = &self.identity.master_addr;
                let ip = self.identity.bind.map_or_else(|| listen_ip(host), Ok).map_err(|e| {
                    self.error(format!("MASTER_ADDR={host} has no address to listen on: {e}"))
                })?;
                Listener::bind((ip, self.identity.master_port).into())
            }
        };
        listener.map_err(|e| self.error(e.to_string()))
    }
}
