//! Rendezvous of a world of processes: every rank registers with rank 0, which sends the member list to
//! all of them. Blocking; every step has the same deadline, and missing ranks are named.

use crate::call::error::{Cause, Error, Failure, Result};
use crate::health::control::{ControlMessage, Member, SharedMemory};
use crate::link::sockets::Credentials;
use crate::wire::{self, Hello, Listener, ListenerHandle, Purpose, Stream};
use crate::world::joiner::Joiner;
use crate::world::member_list::MemberList;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Control connections, with the rank at the other end.
type Streams = Vec<(usize, Stream)>;

/// Interval at which rank 0 checks the connections of registered ranks.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The members and the control connections: to all others on rank 0, to rank 0 elsewhere.
pub(crate) struct Rendezvous {
    pub members: Vec<Member>,
    pub streams: Streams,
    /// On rank 0 the listener stays open, so that late or unknown processes are rejected with a reason.
    pub listener: Option<ListenerHandle>,
}

impl Rendezvous {
    /// Rank 0: waits for all other ranks, then sends them the member list.
    pub(crate) fn lead(
        joiner: &Joiner,
        listener: Listener,
        credentials: &Credentials,
        me: Member,
    ) -> Result<Rendezvous> {
        let (sender, connections) = channel();
        let accept = move |hello: Hello, stream: Stream, _: SocketAddr| {
            if let Err(late) = sender.send((hello, stream)) {
                reject(late.0);
            }
        };
        let handle = listener
            .serve(credentials.expect(), credentials.secret.clone(), accept)
            .map_err(|e| joiner.error(e.to_string()))?;
        let (members, streams) = gather(joiner, &connections, me)?;
        let mut rendezvous = Rendezvous { members, streams, listener: Some(handle) };
        rendezvous.send_to_all(&ControlMessage::Members(rendezvous.members.clone()));
        Ok(rendezvous)
    }

    /// All other ranks: registers with rank 0 and waits for the member list.
    pub(crate) fn register(
        joiner: &Joiner,
        credentials: &Credentials,
        me: Member,
    ) -> Result<Rendezvous> {
        let master = joiner.master()?;
        let hello = credentials.hello(0, Purpose::Control);
        let mut stream =
            wire::connect(credentials.route(master), &hello, &credentials.secret, joiner.deadline)
                .map_err(|e| joiner.error(e.to_string()))?;
        joiner.limit(stream.tcp()).map_err(|e| joiner.system("preparing a connection", e))?;
        ControlMessage::Join(me)
            .send(&mut stream)
            .map_err(|e| joiner.system("registering with rank 0", e))?;
        let members = match receive(joiner, 0, &mut stream)? {
            ControlMessage::Members(members) if members.len() == joiner.identity.size => members,
            other => return Err(unexpected(joiner, 0, "the member list", &other)),
        };
        Ok(Rendezvous { members, streams: vec![(0, stream)], listener: None })
    }

    /// All-gathers the shared memory that the first rank of each host has created.
    pub(crate) fn exchange_memory(
        &mut self,
        joiner: &Joiner,
        own: Option<SharedMemory>,
    ) -> Result<Vec<Option<SharedMemory>>> {
        if joiner.identity.rank != 0 {
            let stream = &mut self.streams[0].1;
            ControlMessage::Ready(own)
                .send(stream)
                .map_err(|e| joiner.system("reporting to rank 0 that this rank is ready", e))?;
            return match receive(joiner, 0, stream)? {
                ControlMessage::Start(all) => Ok(all),
                other => Err(unexpected(joiner, 0, "the start message", &other)),
            };
        }
        let mut all = vec![own];
        for i in 0..self.streams.len() {
            let (rank, stream) = &mut self.streams[i];
            let error = match receive(joiner, *rank, stream) {
                Ok(ControlMessage::Ready(memory)) => {
                    all.push(memory);
                    continue;
                }
                Ok(other) => unexpected(joiner, *rank, "a ready message", &other),
                Err(error) => error,
            };
            let what = match error {
                Error::Join { what, .. } => what,
                other => other.to_string(),
            };
            return Err(give_up(joiner, std::mem::take(&mut self.streams), what));
        }
        self.send_to_all(&ControlMessage::Start(all.clone()));
        Ok(all)
    }

    /// A rank that cannot be reached is noticed at the next receive.
    fn send_to_all(&mut self, message: &ControlMessage) {
        for (rank, stream) in &mut self.streams {
            if let Err(error) = message.send(stream) {
                tracing::warn!("cannot send a rendezvous message to rank {rank}: {error}");
            }
        }
    }
}

/// Rank 0: accepts registrations until all ranks are present.
fn gather(
    joiner: &Joiner,
    connections: &Receiver<(Hello, Stream)>,
    me: Member,
) -> Result<(Vec<Member>, Streams)> {
    let mut list = MemberList::new(joiner.identity.size, me);
    let mut streams: Streams = Vec::new();
    while !list.is_complete() {
        if let Some(rank) = find_closed(&streams) {
            let what = format!("lost the connection to rank {rank} during rendezvous");
            return Err(give_up(joiner, streams, what));
        }
        let left = joiner.time_left();
        let (hello, mut stream) = match connections.recv_timeout(left.min(CHECK_INTERVAL)) {
            Ok(connection) => connection,
            Err(RecvTimeoutError::Timeout) if left > CHECK_INTERVAL => continue,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let what = list.missing_text(joiner.options.join_timeout);
                return Err(give_up(joiner, streams, what));
            }
        };
        if hello.purpose != Purpose::Control {
            continue;
        }
        let rank = hello.from as usize;
        let received =
            joiner.limit(stream.tcp()).and_then(|()| ControlMessage::receive(&mut stream));
        match received {
            Ok(ControlMessage::Join(member)) => {
                streams.push((rank, stream));
                if let Err(what) = list.add(rank, member) {
                    return Err(give_up(joiner, streams, what));
                }
            }
            // The rank may try again; if it does not, it is reported as missing.
            other => tracing::warn!("rank {rank} connected but did not register: {other:?}"),
        }
    }
    streams.sort_by_key(|(rank, _)| *rank);
    Ok((list.into_members(), streams))
}

/// Tells all registered ranks why the world cannot start.
fn give_up(joiner: &Joiner, streams: Streams, what: String) -> Error {
    let (culprit, cause) = (joiner.identity.rank, Cause::Failed);
    let failure = Failure { culprit, cause, text: what.clone() };
    for (_, mut stream) in streams {
        let _ = ControlMessage::Abort(failure.clone()).send(&mut stream);
    }
    joiner.error(what)
}

fn receive(joiner: &Joiner, rank: usize, stream: &mut Stream) -> Result<ControlMessage> {
    match joiner.limit(stream.tcp()).and_then(|()| ControlMessage::receive(stream)) {
        Ok(ControlMessage::Abort(failure)) => Err(joiner.error(failure.text)),
        Ok(message) => Ok(message),
        Err(e) => {
            let what = format!("lost the connection to rank {rank} during rendezvous: {e}");
            Err(joiner.error(what))
        }
    }
}

fn unexpected(joiner: &Joiner, rank: usize, expected: &str, got: &ControlMessage) -> Error {
    joiner.error(format!(
        "unexpected message from rank {rank} during rendezvous: expected {expected}, got {got:?}"
    ))
}

/// The first rank whose connection has closed. Registered ranks send nothing before the member list.
fn find_closed(streams: &[(usize, Stream)]) -> Option<usize> {
    let peek = |stream: &TcpStream| {
        stream.set_nonblocking(true)?;
        let peeked = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        peeked
    };
    let is_closed = |(_, stream): &&(usize, Stream)| match peek(stream.tcp()) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    };
    streams.iter().find(is_closed).map(|(rank, _)| *rank)
}

/// Rejects a process that knows the secret but connects after the world is complete.
fn reject((hello, mut stream): (Hello, Stream)) {
    let rank = hello.from;
    let text = format!("the world is complete and already has another process as rank {rank}");
    tracing::warn!("rejected a process that claims to be rank {rank}: {text}");
    let failure = Failure { culprit: rank as usize, cause: Cause::Failed, text };
    let _ = ControlMessage::Abort(failure).send(&mut stream);
}
