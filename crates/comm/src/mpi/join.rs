//! Joining a world that an MPI launcher started. MPI tells who is there and carries the job's secret
//! to all ranks; then every rank calls rank 0, and the heartbeat starts, like in any other world.

use super::communicator::{Communicator, Handle};
use super::hold::Hold;
use super::numbers::datatype;
use super::oversight::Oversight;
use super::request::Request;
use super::session::{Session, Stay};
use crate::call::error::{Error, Result};
use crate::group::{Group, renumbered};
use crate::health::board::{Board, State};
use crate::health::word::Member;
use crate::link::sockets::Credentials;
use crate::wire::{Listener, Secret};
use crate::world::host::{host_name, kernel_key};
use crate::world::identity::{Identity, Launcher};
use crate::world::join::Desk;
use crate::world::options::Options;
use crate::world::token::TokenSource;
use crate::world::{WORLD_ID, World};
use lockstep_types::Dtype;
use mpi::ffi;
use serde::{Deserialize, Serialize};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

impl World {
    /// Joins the world of all ranks that `mpirun` or `srun` started: starts the MPI library, which
    /// carries the collectives and messages of this world's groups, and our heartbeat beside it.
    ///
    /// Once per process. Dropping the world waits for all ranks and ends the library; so drop it, and
    /// everything made from it, before the process exits. A rank that gets [`Error::Broken`] should
    /// report it and exit with an error: the launcher then ends the job. The library cannot be ended
    /// in good order after a failure, and is not.
    pub fn join_mpi(options: &Options) -> Result<World> {
        let deadline = Instant::now() + options.join_timeout;
        let (session, all) = Session::start().map_err(|what| Error::Join { rank: 0, what })?;
        let (rank, size) = all.place().map_err(|what| Error::Join { rank: 0, what })?;
        let error = |what: String| Error::Join { rank, what };
        let oversight = Oversight::Joining { rank, deadline };

        // Who is there, and on which host.
        let me = Member {
            host: kernel_key(),
            host_name: host_name(),
            pid: std::process::id(),
            listens: None,
        };
        let members: Vec<Member> = exchange(all, size, &me, &oversight)?;
        let hosts = renumbered(members.iter().map(|m| &m.host));

        // Rank 0 opens its port and invites the others.
        let mut listener = None;
        let mut invitation = Err("only rank 0 invites".to_string());
        if rank == 0 {
            invitation = invite(&members, &hosts, options).map(|(own, port)| {
                listener = Some(own);
                port
            });
        }
        let mut answers: Vec<std::result::Result<Invitation, String>> =
            exchange(all, size, &invitation, &oversight)?;
        let Invitation { secret, address } = answers.swap_remove(0).map_err(error)?;

        // Everybody calls rank 0, which from then on hears whether they live.
        let local = hosts.iter().filter(|h| **h == hosts[rank]).count();
        let identity = identity(rank, size, local, address);
        let desk = Desk { identity: &identity, options, deadline };
        let credentials = Credentials {
            secret: Secret::from_hex(&secret).map_err(|e| error(e.to_string()))?,
            generation: 0,
            config: options.config,
            rank: rank as u32,
        };
        let assembled = match listener {
            Some(listener) => desk.call_the_roll(listener, &credentials, me)?,
            None => desk.answer_the_roll(&credentials, me)?,
        };
        let board = Arc::new(own_board(rank, size)?);
        let context = desk.context(hosts, board.clone(), None);
        // Every rank has a board of its own, as if each were on another host.
        let pulse = desk.start_pulse(assembled, board, (0..size).collect())?;

        let everybody = (0..size).collect();
        let comm = Communicator { raw: all, session: session.clone() };
        let group = Group::over_mpi(context, WORLD_ID, "world", everybody, comm);
        let world = World::over_mpi(group, pulse, Stay(session));
        world.barrier()?;
        Ok(world)
    }
}

/// What rank 0 tells the others over MPI, which is the channel that they trust.
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
    let secret = Secret::random().map_err(|e| format!("no secret for the job: {e}"))?;
    let invitation = Invitation { secret: secret.to_hex(), address: listener.local_addr() };
    Ok((listener, invitation))
}

/// The address at which rank 0 is reached: as told; the loopback address if everybody is here; or
/// else the one from which the first other host is reached.
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
        // Connecting a datagram socket sends nothing; it only picks the way.
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(there)?;
        Ok(socket.local_addr()?.ip())
    };
    find().map_err(|e: std::io::Error| {
        format!(
            "rank 0 finds no way to {name}, the host of rank {other}, for the heartbeat: {e}; \
             tell it by Options::bind an address of its own host that the other hosts reach"
        )
    })
}

/// What the part of joining that all worlds share wants to know.
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
        launcher: Launcher::OpenMpi,
    }
}

fn own_board(rank: usize, size: usize) -> Result<Board> {
    let made = Board::create(size).map_err(|e| Error::system(rank, "making a board", e))?;
    let (board, _offer) = made;
    for rank in 0..size {
        board.set_state(rank, State::Running);
        board.beat(rank);
    }
    Ok(board)
}

/// Everybody's value, in the order of ranks.
fn exchange<T: Serialize + for<'de> Deserialize<'de>>(
    all: Handle,
    size: usize,
    own: &T,
    oversight: &Oversight,
) -> Result<Vec<T>> {
    let mut text = serde_json::to_vec(own).expect("plain data");
    let lengths = all_gather(all, size, &text.len().to_le_bytes(), oversight)?;
    let length = |bytes: &[u8]| usize::from_le_bytes(std::array::from_fn(|i| bytes[i]));
    let longest = lengths.chunks_exact(8).map(length).max().unwrap_or(0);
    // JSON does not mind spaces at its end.
    text.resize(longest, b' ');
    let texts = all_gather(all, size, &text, oversight)?;
    let values = texts.chunks_exact(longest.max(1)).map(serde_json::from_slice);
    let values: std::result::Result<Vec<T>, _> = values.collect();
    values.map_err(|e| oversight.failed(format!("a rank speaks nonsense over MPI: {e}")))
}

fn all_gather(all: Handle, size: usize, own: &[u8], oversight: &Oversight) -> Result<Vec<u8>> {
    let mut hold = Hold::default();
    let room = hold.load(own, own.len() * size, Default::default());
    let (each, kind) = (own.len() as c_int, datatype(Dtype::U8));
    // SAFETY: the hold keeps what goes out and room for what comes in until the operation has ended.
    let request = Request::start(|r| unsafe {
        ffi::MPI_Iallgather(room.out, each, kind, room.inc, each, kind, all.0, r)
    });
    request.map_err(|what| oversight.failed(what))?.wait(oversight)?;
    Ok(hold.unload(own.len() * size).to_vec())
}
