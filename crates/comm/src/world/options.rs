//! Options of a world.

use crate::algo::choose::LinkCosts;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Options {
    /// How long a call may wait for its peers.
    pub timeout: Duration,
    /// How long a rank may send no heartbeat before it counts as stopped or unreachable.
    pub heartbeat: Duration,
    /// How long to wait for all ranks to join.
    pub join_timeout: Duration,
    /// Folder for flight records, written when the world breaks. Default: none are written.
    pub record: Option<PathBuf>,
    /// Link costs for choosing algorithms. Default: measured when the world starts.
    pub link_costs: Option<LinkCosts>,
    /// Hash of the configuration. Ranks with different hashes cannot join the same world.
    pub config: [u8; 32],
    /// How ranks of one host are connected.
    pub local: LocalLinks,
    /// Whether ranks of one host may access each other's buffers in place. Otherwise data passes through
    /// slots in shared memory.
    pub direct_access: bool,
    /// Address at which rank 0 of an MPI world receives heartbeats. Default: the local address of a route
    /// to the other hosts. Other worlds get it from their launcher.
    pub bind: Option<IpAddr>,
}

/// How ranks of one host are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LocalLinks {
    /// Through shared memory.
    SharedMemory,
    /// Like ranks of different hosts.
    Tcp,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(30),
            heartbeat: Duration::from_secs(5),
            join_timeout: Duration::from_secs(60),
            record: None,
            link_costs: None,
            config: [0; 32],
            local: LocalLinks::SharedMemory,
            direct_access: true,
            bind: None,
        }
    }
}
