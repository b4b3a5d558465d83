//! What can be set for a world. Every field has a default that is right for most.

use crate::call::choose::Constants;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Options {
    /// How long a call may wait for its peers.
    pub timeout: Duration,
    /// How long a rank may be silent before it counts as stopped or unreachable.
    pub heartbeat: Duration,
    /// How long to wait for all ranks at the start.
    pub join_timeout: Duration,
    /// Where the flight recorder writes when the world breaks; nowhere if not set.
    pub record: Option<PathBuf>,
    /// Link constants for choosing algorithms; measured at the start if not given.
    pub constants: Option<Constants>,
    /// Hash of the configuration: ranks whose hashes differ do not form a world.
    pub config: [u8; 32],
    /// How ranks of one host reach each other.
    pub local: LocalLinks,
    /// Whether ranks of one host may use each other's buffers where they lie. Without it, data passes
    /// through the slots of the memory they share.
    pub direct_access: bool,
    /// The address at which rank 0 of a world over MPI hears the others' heartbeats, if it is not the
    /// one that leads to their hosts. Other worlds are told by their launcher.
    pub bind: Option<IpAddr>,
}

/// How ranks of one host reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LocalLinks {
    /// Through memory that they share.
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
            constants: None,
            config: [0; 32],
            local: LocalLinks::SharedMemory,
            direct_access: true,
            bind: None,
        }
    }
}
