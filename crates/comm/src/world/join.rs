//! Joins a world of processes: the ranks meet at rank 0 (`rendezvous`), the first rank of each host
//! creates the memory that its ranks share, links between hosts are prepared, and the heartbeat starts.

use crate::call::error::Result;
use crate::call::topology::{local_members, number_hosts};
use crate::group::{Group, GroupSpec};
use crate::health::board::{Board, RankState};
use crate::health::control::{Member, SharedMemory};
use crate::health::heartbeat::{Heartbeat, HeartbeatParts};
use crate::health::recorder::Recorder;
use crate::health::watch::SpinPolicy;
use crate::link::sockets::{Credentials, PendingConnections, Sockets};
use crate::memory::arena::Arena;
use crate::memory::segment::{Offer, Segment};
use crate::wire::{Hello, Listener, ListenerHandle, Stream};
use crate::world::context::Context;
use crate::world::host::{host_key, host_name, job_secret};
use crate::world::identity::Identity;
use crate::world::joiner::Joiner;
use crate::world::options::{LocalLinks, Options};
use crate::world::rendezvous::Rendezvous;
use crate::world::{World, local_access, measure};
use lockstep_types::trace::Tracer;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

impl World {
    /// Joins the world that the identity describes; returns when all ranks have joined.
    pub fn join(identity: &Identity, options: &Options) -> Result<World> {
        let joiner = Joiner { identity, options, deadline: Instant::now() + options.join_timeout };
        if identity.size == 1 {
            return joiner.join_alone();
        }
        let world = joiner.join()?;
        local_access::negotiate(&world, options.direct_access)?;
        if options.link_costs.is_none() {
            measure::measure(&world)?;
        }
        Ok(world)
    }
}

/// Links to other hosts before all addresses are known.
struct LinkListener {
    pending: Arc<PendingConnections>,
    handle: ListenerHandle,
}

/// Memory of this host as one rank has mapped it.
struct LocalMemory {
    board: Board,
    arena: Arena,
    /// On the rank that created the memory; must stay open until all ranks have mapped it.
    offers: Option<(Offer, Offer)>,
}

impl Joiner<'_> {
    fn join_alone(&self) -> Result<World> {
        let (board, _offer) = Board::create(1).map_err(|e| self.system("creating a board", e))?;
        let (arena, _offer) = Arena::create(1).map_err(|e| self.system("creating an arena", e))?;
        let context = self.context(vec![0], Arc::new(board), None);
        Ok(World::new(Group::over_links(GroupSpec::world(context), &arena), None))
    }

    fn join(&self) -> Result<World> {
        let secret = job_secret(self.identity).map_err(|what| self.error(what))?;
        let credentials = Credentials {
            secret,
            generation: self.identity.generation,
            config: self.options.config,
            rank: self.identity.rank as u32,
            transport: self.identity.transport,
        };
        let links = self.listen_for_links(&credentials)?;
        let me = Member {
            host: self.host(),
            host_name: host_name(),
            pid: std::process::id(),
            listens: links.as_ref().map(|links| links.handle.local_addr()),
        };
        let mut rendezvous = match self.identity.rank {
            0 => Rendezvous::lead(self, self.listen_on_master_port()?, &credentials, me)?,
            _ => Rendezvous::register(self, &credentials, me)?,
        };
        let hosts = number_hosts(rendezvous.members.iter().map(|m| &m.host));
        let LocalMemory { board, arena, offers } = self.share_memory(&mut rendezvous, &hosts)?;
        let board = Arc::new(board);
        let sockets = self.sockets(&rendezvous.members, &hosts, credentials, links)?;
        let context = self.context(hosts.clone(), board.clone(), sockets);
        let heartbeat = self.start_heartbeat(rendezvous, board, hosts)?;
        let group = Group::over_links(GroupSpec::world(context), &arena);
        let world = World::new(group, Some(heartbeat));
        // After the barrier all ranks have mapped the memory, and the offers may be closed.
        world.barrier()?;
        drop(offers);
        Ok(world)
    }

    /// Equal for ranks that can share memory.
    fn host(&self) -> String {
        let key = host_key(self.identity);
        match self.options.local {
            LocalLinks::SharedMemory => key,
            LocalLinks::Tcp => format!("{key}/rank {}", self.identity.rank),
        }
    }

    /// Listens for links, unless all ranks are on one host and share memory.
    fn listen_for_links(&self, credentials: &Credentials) -> Result<Option<LinkListener>> {
        let one_host = self.identity.local_size == self.identity.size;
        if one_host && self.options.local == LocalLinks::SharedMemory {
            return Ok(None);
        }
        let ip = self.own_ip()?;
        let listener = Listener::bind((ip, 0).into()).map_err(|e| self.error(e.to_string()))?;
        let pending = Arc::new(PendingConnections::default());
        let added = pending.clone();
        let add = move |hello: Hello, stream: Stream, _: SocketAddr| added.add(&hello, stream);
        let handle = listener
            .serve(credentials.expect(), credentials.secret.clone(), add)
            .map_err(|e| self.error(e.to_string()))?;
        Ok(Some(LinkListener { pending, handle }))
    }

    /// The first rank of each host creates the memory; the others map it.
    fn share_memory(&self, rendezvous: &mut Rendezvous, hosts: &[usize]) -> Result<LocalMemory> {
        let rank = self.identity.rank;
        let locals = local_members(hosts, hosts[rank]);
        let created = if locals[0] == rank {
            Some(self.create_memory(hosts.len(), locals.len())?)
        } else {
            None
        };
        let own = created.as_ref().and_then(|memory| {
            let (board, arena) = memory.offers.as_ref()?;
            Some(SharedMemory { board: board.address(), arena: arena.address() })
        });
        let all = rendezvous.exchange_memory(self, own)?;
        if let Some(memory) = created {
            return Ok(memory);
        }
        let leader = locals[0];
        let Some(shared) = all.get(leader).copied().flatten() else {
            let what = format!("rank {leader}, the first of its host, created no shared memory");
            return Err(self.error(what));
        };
        let doing = format!("mapping the memory of rank {leader}");
        let segment = Segment::open(shared.board, Board::bytes(hosts.len()))
            .map_err(|e| self.system(&doing, e))?;
        let arena = Arena::open(shared.arena, locals.len()).map_err(|e| self.system(&doing, e))?;
        Ok(LocalMemory { board: Board::from_segment(segment, hosts.len()), arena, offers: None })
    }

    fn create_memory(&self, ranks: usize, locals: usize) -> Result<LocalMemory> {
        let (board, board_offer) =
            Board::create(ranks).map_err(|e| self.system("creating a board", e))?;
        let (arena, arena_offer) =
            Arena::create(locals).map_err(|e| self.system("creating an arena", e))?;
        for rank in 0..ranks {
            board.set_state(rank, RankState::Running);
            board.beat(rank);
        }
        Ok(LocalMemory { board, arena, offers: Some((board_offer, arena_offer)) })
    }

    fn sockets(
        &self,
        members: &[Member],
        hosts: &[usize],
        credentials: Credentials,
        links: Option<LinkListener>,
    ) -> Result<Option<Arc<Sockets>>> {
        let own = self.identity.rank;
        let Some(LinkListener { pending, handle }) = links else {
            return match (0..hosts.len()).find(|r| hosts[*r] != hosts[own]) {
                None => Ok(None),
                Some(rank) => Err(self.error(format!(
                    "rank {rank} claims to be on this host but shares no kernel with rank {own}; \
                     start them as different nodes, or use TCP links"
                ))),
            };
        };
        let address = |(rank, member): (usize, &Member)| {
            member.listens.ok_or_else(|| self.error(format!("rank {rank} accepts no TCP links")))
        };
        let addresses = members.iter().enumerate().map(address).collect::<Result<Vec<_>>>()?;
        Ok(Some(Arc::new(Sockets::new(credentials, addresses, pending, handle))))
    }

    pub(crate) fn context(
        &self,
        hosts: Vec<usize>,
        board: Arc<Board>,
        sockets: Option<Arc<Sockets>>,
    ) -> Arc<Context> {
        let rank = self.identity.rank;
        Arc::new(Context {
            rank,
            board,
            timeout: self.options.timeout,
            spin_policy: SpinPolicy::for_ranks(self.identity.local_size),
            sockets,
            recorder: Recorder::new(rank, self.options.record.clone()),
            tracer: Tracer::default(),
            access: Default::default(),
            measured: self.options.link_costs.map_or_else(OnceLock::new, OnceLock::from),
            hosts,
        })
    }

    /// `boards` is the board of each rank.
    pub(crate) fn start_heartbeat(
        &self,
        rendezvous: Rendezvous,
        board: Arc<Board>,
        boards: Vec<usize>,
    ) -> Result<Heartbeat> {
        let Rendezvous { members, streams, listener } = rendezvous;
        let name = |rank: usize| {
            let member: &Member = &members[rank];
            format!("rank {rank} (process {} on {})", member.pid, member.host_name)
        };
        let streams =
            streams.into_iter().map(|(rank, stream)| (rank, name(rank), stream)).collect();
        let parts = HeartbeatParts {
            rank: self.identity.rank,
            board,
            streams,
            timeout: self.options.heartbeat,
            boards,
            listener,
        };
        Heartbeat::start(parts).map_err(|e| self.system("starting the heartbeat", e))
    }
}
