//! Joins a world that an MPI launcher started. MPI provides the ranks and distributes the job's secret;
//! then every rank registers with rank 0, and the heartbeat starts, as in any other world.

use super::communicator::Communicator;
use super::handle::Handle;
use super::numbers::datatype;
use super::request::Request;
use super::session::{Session, SessionGuard};
use super::staging::StagingBuffers;
use super::supervision::Supervision;
use crate::call::error::{Error, Result};
use crate::call::topology::number_hosts;
use crate::group::{Group, GroupSpec};
use crate::health::board::{Board, RankState};
use crate::health::control::Member;
use crate::link::sockets::Credentials;
use crate::wire::{Listener, Secret};
use crate::world::World;
use crate::world::address::local_ip_towards;
use crate::world::host::{host_name, kernel_key};
use crate::world::identity::{Identity, Launcher, Transport};
use crate::world::joiner::Joiner;
use crate::world::options::Options;
use crate::world::rendezvous::Rendezvous;
use crate::world::token::TokenSource;
use lockstep_types::Dtype;
use mpi::ffi;
use serde::{Deserialize, Serialize};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Instant;

impl World {
    /// Joins the world of all ranks that `mpirun` or `srun` started. Initializes the MPI library, which
    /// performs the collectives and messages of this world's groups, and starts the heartbeat.
    ///
    /// May be called once per process. Dropping the world waits for all ranks and finalizes the library;
    /// drop it, and everything created from it, before the process exits. A rank that gets
    /// [`Error::Broken`] should report it and exit with an error, so that the launcher ends the job. The
    /// library is not finalized after a failure.
    pub fn join_mpi(options: &Options) -> Result<World> {
        let deadline = Instant::now() + options.join_timeout;
        let (session, all) = Session::start().map_err(|what| Error::Join { rank: 0, what })?;
        let (rank, size) = all.rank_and_size().map_err(|what| Error::Join { rank: 0, what })?;
        let error = |what: String| Error::Join { rank, what };
        let supervision = Supervision::Joining { rank, deadline };

        // All members and their hosts.
        let me = Member {
            host: kernel_key(),
            host_name: host_name(),
            pid: std::process::id(),
            listens: None,
        };
        let members: Vec<Member> = exchange(all, size, &me, &supervision)?;
        let hosts = number_hosts(members.iter().map(|m| &m.host));

        // Rank 0 opens its port and sends the invitation.
        let mut listener = None;
        let mut invitation = Err("only rank 0 sends an invitation".to_string());
        if rank == 0 {
            invitation = invite(&members, &hosts, options).map(|(own, port)| {
                listener = Some(own);
                port
            });
        }
        let mut answers: Vec<std::result::Result<Invitation, String>> =
            exchange(all, size, &invitation, &supervision)?;
        let Invitation { secret, address } = answers.swap_remove(0).map_err(error)?;

        // All ranks register with rank 0, which monitors them from then on.
        let local = hosts.iter().filter(|h| **h == hosts[rank]).count();
        let identity = identity(rank, size, local, address);
        let joiner = Joiner { identity: &identity, options, deadline };
        let credentials = Credentials {
            secret: Secret::from_hex(&secret).map_err(|e| error(e.to_string()))?,
            generation: 0,
            config: options.config,
            rank: rank as u32,
            transport: Transport::default(),
        };
        let rendezvous = match listener {
            Some(listener) => Rendezvous::lead(&joiner, listener, &credentials, me)?,
            None => Rendezvous::register(&joiner, &credentials, me)?,
        };
        let board = Arc::new(own_board(rank, size)?);
        let context = joiner.context(hosts, board.clone(), None);
        // Every rank has its own board, as if all were on different hosts.
        let heartbeat = joiner.start_heartbeat(rendezvous, board, (0..size).collect())?;

        let comm = Communicator { raw: all, session: session.clone() };
        let group = Group::over_mpi(GroupSpec::world(context), comm);
        let world = World::over_mpi(group, heartbeat, SessionGuard(session));
        world.barrier()?;
        Ok(world)
    }
}

/// Sent by rank 0 to the others over MPI, which they trust.
#[derive(Serialize, Deserialize)]
struct Invitation {
    secret: String,
    address: SocketAddr,
}

fn invite(
    members: &[Member],
    hosts: &[usize],
    options: &Options,
) -> std::result::Result<(Listener, Invitation), String> {
    let ip = own_ip(members, hosts, options)?;
    let listener = Listener::bind((ip, 0).into()).map_err(|e| e.to_string())?;
    let secret =
        Secret::random().map_err(|e| format!("cannot create a secret for the job: {e}"))?;
    let invitation = Invitation { secret: secret.to_hex(), address: listener.local_addr() };
    Ok((listener, invitation))
}

/// Address of rank 0: as configured, the loopback address if all ranks are on this host, or else the local
/// address of a route to the first other host.
fn own_ip(
    members: &[Member],
    hosts: &[usize],
    options: &Options,
) -> std::result::Result<IpAddr, String> {
    if let Some(ip) = options.bind {
        return Ok(ip);
    }
    let Some(other) = hosts.iter().position(|h| *h != 0) else {
        return Ok(Ipv4Addr::LOCALHOST.into());
    };
    let name = &members[other].host_name;
    let find = || {
        let mut found = (name.as_str(), 1).to_socket_addrs()?.filter(SocketAddr::is_ipv4);
        let there = found.next().ok_or_else(|| std::io::Error::other("it has no IPv4 address"))?;
        local_ip_towards(there)
    };
    find().map_err(|e: std::io::Error| {
        format!(
            "rank 0 has no route to {name}, the host of rank {other}, for the heartbeat: {e}; set \
             Options::bind to an address of rank 0's host that the other hosts can reach"
        )
    })
}

/// The identity of a rank, as far as the common part of joining needs it.
fn identity(rank: usize, size: usize, local_size: usize, master: SocketAddr) -> Identity {
    Identity {
        rank,
        size,
        local_rank: 0,
        local_size,
        node: 0,
        master_addr: master.ip().to_string(),
        master_port: master.port(),
        token: TokenSource::None,
        generation: 0,
        bind: None,
        listener_fd: None,
        transport: Transport::default(),
        launcher: Launcher::OpenMpi,
    }
}

fn own_board(rank: usize, size: usize) -> Result<Board> {
    let created = Board::create(size).map_err(|e| Error::system(rank, "creating a board", e))?;
    let (board, _offer) = created;
    for rank in 0..size {
        board.set_state(rank, RankState::Running);
        board.beat(rank);
    }
    Ok(board)
}

/// All-gathers a value, in rank order.
fn exchange<T: Serialize + for<'de> Deserialize<'de>>(
    all: Handle,
    size: usize,
    own: &T,
    supervision: &Supervision,
) -> Result<Vec<T>> {
    let mut text = serde_json::to_vec(own).expect("plain data serializes");
    let lengths = all_gather(all, size, &text.len().to_le_bytes(), supervision)?;
    let length = |bytes: &[u8]| usize::from_le_bytes(std::array::from_fn(|i| bytes[i]));
    let longest = lengths.chunks_exact(8).map(length).max().unwrap_or(0);
    // JSON allows trailing spaces.
    text.resize(longest, b' ');
    let texts = all_gather(all, size, &text, supervision)?;
    let values = texts.chunks_exact(longest.max(1)).map(serde_json::from_slice);
    let values: std::result::Result<Vec<T>, _> = values.collect();
    values.map_err(|e| supervision.failed(format!("invalid message over MPI: {e}")))
}

fn all_gather(all: Handle, size: usize, own: &[u8], supervision: &Supervision) -> Result<Vec<u8>> {
    let mut buffers = StagingBuffers::default();
    let addresses = buffers.load(own, own.len() * size, Default::default());
    let (each, kind) = (own.len() as c_int, datatype(Dtype::U8));
    // SAFETY: the staging buffers hold the data sent and received until the operation has ended.
    let request = Request::start(|r| unsafe {
        ffi::MPI_Iallgather(addresses.out, each, kind, addresses.inc, each, kind, all.0, r)
    });
    request.map_err(|what| supervision.failed(what))?.wait(supervision)?;
    Ok(buffers.unload(own.len() * size).to_vec())
}
