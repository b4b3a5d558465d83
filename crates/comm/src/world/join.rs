//! Joining a world of processes: every rank calls rank 0, rank 0 calls the roll, the first rank of
//! each host makes the memory that its ranks share, and the heartbeat starts. Blocking and in order;
//! every step has the same deadline, and whoever is missing is named.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::group::Group;
use crate::health::board::{Board, State};
use crate::health::pulse::{Pulse, PulseParts};
use crate::health::recorder::Recorder;
use crate::health::watch::Patience;
use crate::health::word::{Member, Shares, Word};
use crate::link::sockets::{Credentials, Hall, Sockets};
use crate::memory::arena::Arena;
use crate::memory::segment::Segment;
use crate::wire::{self, Hello, Listener, ListenerHandle, Purpose};
use crate::world::context::Context;
use crate::world::host::{host_key, host_name, job_secret};
use crate::world::identity::Identity;
use crate::world::inherited::inherited_listener;
use crate::world::options::{LocalLinks, Options};
use crate::world::roll::Roll;
use crate::world::{WORLD_ID, World};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

impl World {
    /// Joins the world that the identity describes; returns when all ranks are there. A world of one
    /// needs nobody else.
    pub fn join(identity: &Identity, options: &Options) -> Result<World> {
        let desk = Desk { identity, options, deadline: Instant::now() + options.join_timeout };
        if identity.size == 1 {
            return desk.alone();
        }
        let world = desk.join()?;
        crate::memory::reach::agree(&world, options.direct_access)?;
        if options.constants.is_none() {
            crate::world::measure::measure(&world)?;
        }
        Ok(world)
    }
}

/// The control connections, with the rank at the other end.
type Streams = Vec<(usize, TcpStream)>;

/// What a rank has at hand while it joins.
pub(crate) struct Desk<'a> {
    pub identity: &'a Identity,
    pub options: &'a Options,
    pub deadline: Instant,
}

/// The roll and the control connections: with all others at rank 0, with rank 0 elsewhere.
pub(crate) struct Assembled {
    members: Vec<Member>,
    streams: Streams,
    /// At rank 0 the port stays open, so that strangers and leftovers are told to go.
    listener: Option<ListenerHandle>,
}

impl Desk<'_> {
    fn alone(&self) -> Result<World> {
        let (board, _offer) = Board::create(1).map_err(|e| self.system("making a board", e))?;
        let (arena, _offer) = Arena::create(1).map_err(|e| self.system("making an arena", e))?;
        let context = self.context(vec![0], Arc::new(board), None);
        Ok(World::new(Group::over_links(context, WORLD_ID, "world", vec![0], &arena), None))
    }

    fn join(&self) -> Result<World> {
        let secret = job_secret(self.identity).map_err(|what| self.error(what))?;
        let credentials = Credentials {
            secret,
            generation: self.identity.generation,
            config: self.options.config,
            rank: self.identity.rank as u32,
        };
        let hall = Arc::new(Hall::default());
        let links = self.listen_for_links(&credentials, &hall)?;
        let me = Member {
            host: self.host(),
            host_name: host_name(),
            pid: std::process::id(),
            listens: links.as_ref().map(ListenerHandle::local_addr),
        };
        let mut assembled = match self.identity.rank {
            0 => self.call_the_roll(self.open_the_port()?, &credentials, me)?,
            _ => self.answer_the_roll(&credentials, me)?,
        };
        let hosts = crate::group::renumbered(assembled.members.iter().map(|m| &m.host));
        let (board, arena, offers) = self.share_memory(&mut assembled, &hosts)?;
        let board = Arc::new(board);
        let sockets = self.links(&assembled.members, &hosts, credentials, hall, links)?;
        let context = self.context(hosts.clone(), board.clone(), sockets);
        let pulse = self.start_pulse(assembled, board, hosts)?;
        let everybody = (0..self.identity.size).collect();
        let group = Group::over_links(context, WORLD_ID, "world", everybody, &arena);
        let world = World::new(group, Some(pulse));
        // Once everybody is past this, everybody has the memory mapped and the offers may go.
        world.barrier()?;
        drop(offers);
        Ok(world)
    }

    /// Ranks with the same answer can share memory.
    fn host(&self) -> String {
        let key = host_key(self.identity);
        match self.options.local {
            LocalLinks::SharedMemory => key,
            LocalLinks::Tcp => format!("{key}/rank {}", self.identity.rank),
        }
    }

    /// Ranks of one host that share memory take no links.
    fn listen_for_links(
        &self,
        credentials: &Credentials,
        hall: &Arc<Hall>,
    ) -> Result<Option<ListenerHandle>> {
        let one_host = self.identity.local_size == self.identity.size;
        if one_host && self.options.local == LocalLinks::SharedMemory {
            return Ok(None);
        }
        let ip = self.own_ip()?;
        let listener = Listener::bind((ip, 0).into()).map_err(|e| self.error(e.to_string()))?;
        let hall = hall.clone();
        let admit =
            move |hello: Hello, stream: TcpStream, _: SocketAddr| hall.admit(&hello, stream);
        let handle = listener
            .serve(credentials.expect(), credentials.secret.clone(), admit)
            .map_err(|e| self.error(e.to_string()))?;
        Ok(Some(handle))
    }

    /// The address we are reached at: as told, or the one from which we reach the master. So a world
    /// on the loopback address stays there.
    fn own_ip(&self) -> Result<IpAddr> {
        if let Some(ip) = self.identity.bind {
            return Ok(ip);
        }
        let master = self.master()?;
        let find = || {
            let any: IpAddr = match master.ip() {
                IpAddr::V4(_) => [0, 0, 0, 0].into(),
                IpAddr::V6(_) => [0u16; 8].into(),
            };
            // Connecting a datagram socket sends nothing; it only picks the way.
            let socket = std::net::UdpSocket::bind((any, 0))?;
            socket.connect(master)?;
            Ok(socket.local_addr()?.ip())
        };
        find().map_err(|e| self.system(&format!("finding the way to {master}"), e))
    }

    fn master(&self) -> Result<SocketAddr> {
        let (host, port) = (self.identity.master_addr.as_str(), self.identity.master_port);
        let found = (host, port).to_socket_addrs().map(|mut all| all.next());
        match found {
            Ok(Some(address)) => Ok(address),
            Ok(None) => Err(self.error(format!("MASTER_ADDR={host} has no address"))),
            Err(e) => Err(self.error(format!("MASTER_ADDR={host} cannot be resolved: {e}"))),
        }
    }

    /// Rank 0: the port at which the others look for it.
    fn open_the_port(&self) -> Result<Listener> {
        let listener = match self.identity.listener_fd {
            Some(fd) => {
                let inherited = inherited_listener(fd)
                    .map_err(|e| self.system("taking over the launcher's port", e))?;
                Listener::from_std(inherited)
            }
            None => {
                let ip = self.identity.bind.map_or_else(|| self.master().map(|a| a.ip()), Ok)?;
                Listener::bind((ip, self.identity.master_port).into())
            }
        };
        listener.map_err(|e| self.error(e.to_string()))
    }

    /// Rank 0: takes everybody's name, then tells all of them all the names.
    pub(crate) fn call_the_roll(
        &self,
        listener: Listener,
        credentials: &Credentials,
        me: Member,
    ) -> Result<Assembled> {
        let (sender, arrivals) = channel();
        let arrive = move |hello: Hello, stream: TcpStream, _: SocketAddr| {
            if let Err(late) = sender.send((hello, stream)) {
                turn_away(late.0);
            }
        };
        let handle = listener
            .serve(credentials.expect(), credentials.secret.clone(), arrive)
            .map_err(|e| self.error(e.to_string()))?;
        let (members, streams) = self.gather(&arrivals, me)?;
        let mut assembled = Assembled { members, streams, listener: Some(handle) };
        let roll = Word::Roll(assembled.members.clone());
        self.tell_all(&mut assembled, &roll);
        Ok(assembled)
    }

    fn gather(
        &self,
        arrivals: &Receiver<(Hello, TcpStream)>,
        me: Member,
    ) -> Result<(Vec<Member>, Streams)> {
        let mut roll = Roll::new(self.identity.size, me);
        let mut streams: Streams = Vec::new();
        while !roll.complete() {
            if let Some(rank) = gone(&streams) {
                let what = format!("rank {rank} came and was lost while the world formed");
                return Err(self.give_up(streams, what));
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            let (hello, mut stream) = match arrivals.recv_timeout(left.min(LOOK)) {
                Ok(arrival) => arrival,
                Err(RecvTimeoutError::Timeout) if left > LOOK => continue,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let what = roll.missing_text(self.options.join_timeout);
                    return Err(self.give_up(streams, what));
                }
            };
            if hello.purpose != Purpose::Control {
                continue;
            }
            let rank = hello.from as usize;
            let heard = self.limit(&stream).and_then(|()| Word::receive(&mut stream));
            match heard {
                Ok(Word::Join(member)) => {
                    streams.push((rank, stream));
                    if let Err(what) = roll.arrive(rank, member) {
                        return Err(self.give_up(streams, what));
                    }
                }
                // A rank that hangs up or talks nonsense may come again; if not, it is missing.
                other => tracing::warn!("rank {rank} came but did not join: {other:?}"),
            }
        }
        streams.sort_by_key(|(rank, _)| *rank);
        Ok((roll.into_members(), streams))
    }

    /// Everybody who is there hears why it will not be.
    fn give_up(&self, streams: Streams, what: String) -> Error {
        let (guilty, cause) = (self.identity.rank, Cause::Failed);
        let failure = Failure { guilty, cause, text: what.clone() };
        for (_, mut stream) in streams {
            let _ = Word::Abort(failure.clone()).send(&mut stream);
        }
        self.error(what)
    }

    pub(crate) fn answer_the_roll(
        &self,
        credentials: &Credentials,
        me: Member,
    ) -> Result<Assembled> {
        let master = self.master()?;
        let hello = credentials.hello(0, Purpose::Control);
        let mut stream = wire::connect(master, &hello, &credentials.secret, self.deadline)
            .map_err(|e| self.error(e.to_string()))?;
        self.limit(&stream).map_err(|e| self.system("preparing a connection", e))?;
        Word::Join(me)
            .send(&mut stream)
            .map_err(|e| self.system("telling rank 0 that we are here", e))?;
        let members = match self.hear(0, &mut stream)? {
            Word::Roll(members) if members.len() == self.identity.size => members,
            other => return Err(self.error(format!("rank 0 said {other:?} instead of the roll"))),
        };
        Ok(Assembled { members, streams: vec![(0, stream)], listener: None })
    }

    /// The first rank of each host makes the memory; the others find it by its address.
    fn share_memory(
        &self,
        assembled: &mut Assembled,
        hosts: &[usize],
    ) -> Result<(Board, Arena, Option<Offers>)> {
        let rank = self.identity.rank;
        let locals = crate::group::lane::locals_of(hosts, hosts[rank]);
        let mut made = None;
        if locals[0] == rank {
            let (board, board_offer) =
                Board::create(hosts.len()).map_err(|e| self.system("making a board", e))?;
            let (arena, arena_offer) =
                Arena::create(locals.len()).map_err(|e| self.system("making an arena", e))?;
            for rank in 0..hosts.len() {
                board.set_state(rank, State::Running);
                board.beat(rank);
            }
            made = Some((board, arena, (board_offer, arena_offer)));
        }
        let own = made.as_ref().map(|(_, _, (board, arena))| Shares {
            board: board.address(),
            arena: arena.address(),
        });
        let shares = self.exchange_shares(assembled, own)?;
        if let Some((board, arena, offers)) = made {
            return Ok((board, arena, Some(offers)));
        }
        let leader = locals[0];
        let Some(shares) = shares.get(leader).copied().flatten() else {
            return Err(self.error(format!("rank {leader} has made no memory for its host")));
        };
        let doing = format!("mapping the memory of rank {leader}");
        let segment = Segment::open(shares.board, Board::bytes(hosts.len()))
            .map_err(|e| self.system(&doing, e))?;
        let arena = Arena::open(shares.arena, locals.len()).map_err(|e| self.system(&doing, e))?;
        Ok((Board::over(segment, hosts.len()), arena, None))
    }

    fn exchange_shares(
        &self,
        assembled: &mut Assembled,
        own: Option<Shares>,
    ) -> Result<Vec<Option<Shares>>> {
        if self.identity.rank != 0 {
            let stream = &mut assembled.streams[0].1;
            Word::Ready(own)
                .send(stream)
                .map_err(|e| self.system("telling rank 0 that we are ready", e))?;
            return match self.hear(0, stream)? {
                Word::Go(shares) => Ok(shares),
                other => Err(self.error(format!("rank 0 said {other:?} instead of go"))),
            };
        }
        let mut all = vec![own];
        for i in 0..assembled.streams.len() {
            let (rank, stream) = &mut assembled.streams[i];
            let what = match self.hear(*rank, stream) {
                Ok(Word::Ready(shares)) => {
                    all.push(shares);
                    continue;
                }
                Ok(other) => format!("rank {rank} said {other:?}, not ready"),
                Err(Error::Join { what, .. }) => what,
                Err(other) => other.to_string(),
            };
            return Err(self.give_up(std::mem::take(&mut assembled.streams), what));
        }
        self.tell_all(assembled, &Word::Go(all.clone()));
        Ok(all)
    }

    /// Who cannot be told any more is noticed when it is listened to.
    fn tell_all(&self, assembled: &mut Assembled, word: &Word) {
        for (rank, stream) in &mut assembled.streams {
            if let Err(error) = word.send(stream) {
                tracing::warn!("rank {rank} cannot be told that the world forms: {error}");
            }
        }
    }

    fn hear(&self, rank: usize, stream: &mut TcpStream) -> Result<Word> {
        match self.limit(stream).and_then(|()| Word::receive(stream)) {
            Ok(Word::Abort(failure)) => Err(self.error(failure.text)),
            Ok(word) => Ok(word),
            Err(e) => Err(self.error(format!("rank {rank} was lost while the world formed: {e}"))),
        }
    }

    /// No read or write takes longer than the time that is left.
    fn limit(&self, stream: &TcpStream) -> std::io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(10));
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))
    }

    fn links(
        &self,
        members: &[Member],
        hosts: &[usize],
        credentials: Credentials,
        hall: Arc<Hall>,
        listener: Option<ListenerHandle>,
    ) -> Result<Option<Arc<Sockets>>> {
        let Some(listener) = listener else {
            let apart = (0..hosts.len()).find(|r| hosts[*r] != hosts[self.identity.rank]);
            return match apart {
                None => Ok(None),
                Some(rank) => Err(self.error(format!(
                    "rank {rank} says it is on this host but shares no kernel with rank {}; start \
                     them as different nodes, or with links over TCP",
                    self.identity.rank
                ))),
            };
        };
        let address = |(rank, member): (usize, &Member)| {
            member.listens.ok_or_else(|| self.error(format!("rank {rank} takes no links")))
        };
        let addresses = members.iter().enumerate().map(address).collect::<Result<Vec<_>>>()?;
        Ok(Some(Arc::new(Sockets::new(credentials, addresses, hall, listener))))
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
            patience: Patience::for_ranks(self.identity.local_size),
            sockets,
            recorder: Recorder::new(rank, self.options.record.clone()),
            direct_access: Arc::default(),
            may_pull: Arc::default(),
            heaps: Arc::default(),
            measured: self.options.constants.map_or_else(OnceLock::new, OnceLock::from),
            hosts,
        })
    }

    pub(crate) fn start_pulse(
        &self,
        assembled: Assembled,
        board: Arc<Board>,
        boards: Vec<usize>,
    ) -> Result<Pulse> {
        let Assembled { members, streams, listener } = assembled;
        let name = |rank: usize| {
            let member: &Member = &members[rank];
            format!("rank {rank} (process {} on {})", member.pid, member.host_name)
        };
        let streams =
            streams.into_iter().map(|(rank, stream)| (rank, name(rank), stream)).collect();
        let parts = PulseParts {
            rank: self.identity.rank,
            board,
            streams,
            heartbeat: self.options.heartbeat,
            boards,
            listener,
        };
        Pulse::start(parts).map_err(|e| self.system("starting the heartbeat", e))
    }

    fn error(&self, what: String) -> Error {
        Error::Join { rank: self.identity.rank, what }
    }

    fn system(&self, doing: &str, source: std::io::Error) -> Error {
        Error::system(self.identity.rank, doing, source)
    }
}

/// How often those who wait for the roll are looked after.
const LOOK: Duration = Duration::from_millis(200);

/// The first rank whose connection has closed. While the roll is called nobody has anything to say.
fn gone(streams: &[(usize, TcpStream)]) -> Option<usize> {
    let closed = |stream: &TcpStream| {
        stream.set_nonblocking(true)?;
        let peeked = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        peeked
    };
    let lost = |(_, stream): &&(usize, TcpStream)| match closed(stream) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    };
    streams.iter().find(lost).map(|(rank, _)| *rank)
}

/// Tells one that knows the secret, but comes when everybody is there, why it cannot stay.
fn turn_away((hello, mut stream): (Hello, TcpStream)) {
    let rank = hello.from;
    let text = format!("the world is complete, and another process is rank {rank} in it");
    tracing::warn!("turned away a process that calls itself rank {rank}: {text}");
    let failure = Failure { guilty: rank as usize, cause: Cause::Failed, text };
    let _ = Word::Abort(failure).send(&mut stream);
}

/// The open ends of the shared memory, kept until everybody has it mapped.
type Offers = (crate::memory::segment::Offer, crate::memory::segment::Offer);
