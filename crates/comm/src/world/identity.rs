//! The identity of a rank: its place in the job, and where and with which secret it joins the others. A plain value;
//! never reads the environment.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::token::TokenSource;

/// Everything a process needs to join its world. Serialized, it contains the token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub rank: usize,
    pub size: usize,
    pub local_rank: usize,
    pub local_size: usize,
    /// Index of the host. A guess under MPI, which does not report it.
    pub node: usize,
    /// Host of rank 0.
    pub master_addr: String,
    /// Port that rank 0 listens on. 0 only for a world of one.
    pub master_port: u16,
    pub token: TokenSource,
    /// Number of restarts of the job so far.
    pub generation: u32,
    /// Address to listen on. Default: the one from which the master is reached.
    pub bind: Option<IpAddr>,
    /// Socket that rank 0 inherited from its launcher, already listening on the master port.
    pub listener_fd: Option<i32>,
    pub transport: Transport,
    pub launcher: Launcher,
}

impl Identity {
    /// One of `size` ranks that are processes of this user on this host and meet at a free port.
    pub fn local(rank: usize, size: usize, port: u16) -> Identity {
        Identity {
            rank,
            size,
            local_rank: rank,
            local_size: size,
            node: 0,
            master_addr: "127.0.0.1".into(),
            master_port: port,
            token: TokenSource::None,
            generation: 0,
            bind: None,
            listener_fd: None,
            transport: Transport::default(),
            launcher: Launcher::Explicit,
        }
    }
}

/// How processes of a job are connected over TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transport {
    /// SOCKS5 proxy through which this process connects to others.
    pub socks5: Option<SocketAddr>,
    /// Encrypts all traffic. The same on all processes of a job.
    pub encrypt: bool,
}

/// The launcher that started a process, as far as its environment tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Launcher {
    /// `RANK` and `WORLD_SIZE`, as set by `lockstep launch`, torchrun and Kubeflow.
    Explicit,
    OpenMpi,
    /// MPICH and Intel MPI.
    Pmi,
    Slurm,
    /// No launcher: rank 0 of 1.
    Standalone,
}
