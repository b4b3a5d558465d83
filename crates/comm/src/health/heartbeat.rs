//! Heartbeat thread of a rank that is a process: sends heartbeats, receives those of others, and forwards
//! alarms. Moves bytes and keeps time; decisions are made in `failure_detector`.

use crate::health::board::{Board, RankState, monotonic_ms};
use crate::health::control::{ControlMessage, RankReport};
use crate::health::failure_detector::{Action, Event, FailureDetector};
use crate::wire::{ListenerHandle, Stream};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval between heartbeats.
const BEAT_MS: u64 = 500;
/// Interval between checks of the board for an alarm that must be forwarded to other hosts.
const CHECK_MS: i32 = 100;

pub(crate) struct HeartbeatParts {
    pub rank: usize,
    pub board: Arc<Board>,
    /// Rank, name and connection of each peer.
    pub streams: Vec<(usize, String, Stream)>,
    /// How long a peer may be silent.
    pub timeout: Duration,
    /// The board of each rank; the reports of ranks on other boards are copied to ours.
    pub boards: Vec<usize>,
    /// On rank 0, the listener of the rendezvous. It stays open as long as the world exists, so that
    /// unknown processes and those of an older generation are rejected with a reason.
    pub listener: Option<ListenerHandle>,
}

/// Handle of the heartbeat thread. Dropping it says goodbye and stops the thread; rank 0 first waits until
/// all others have left, because it alone monitors them.
pub(crate) struct Heartbeat {
    stopping: Arc<AtomicBool>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    pub(crate) fn start(parts: HeartbeatParts) -> std::io::Result<Heartbeat> {
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        for (_, _, stream) in &parts.streams {
            stream.tcp().set_nonblocking(true)?;
        }
        let stopping = Arc::new(AtomicBool::new(false));
        let flag = stopping.clone();
        let thread = std::thread::Builder::new()
            .name("lockstep-heartbeat".into())
            .spawn(move || HeartbeatThread::new(parts, woken, flag).run())?;
        Ok(Heartbeat { stopping, wake, thread: Some(thread) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Fails only if the thread has already ended.
        let _ = self.wake.write_all(&[0]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct HeartbeatThread {
    rank: usize,
    boards: Vec<usize>,
    board: Arc<Board>,
    detector: FailureDetector,
    connections: BTreeMap<usize, Connection>,
    woken: UnixStream,
    stopping: Arc<AtomicBool>,
    said_goodbye: bool,
    _listener: Option<ListenerHandle>,
}

struct Connection {
    stream: Stream,
    incoming: Vec<u8>,
    /// Bytes that the kernel has not accepted yet.
    outgoing: Vec<u8>,
}

impl HeartbeatThread {
    fn new(parts: HeartbeatParts, woken: UnixStream, stopping: Arc<AtomicBool>) -> HeartbeatThread {
        let names = parts.streams.iter().map(|(rank, name, _)| (*rank, name.clone())).collect();
        let timeout = parts.timeout.as_millis() as u64;
        let several_boards = parts.boards.iter().any(|b| *b != parts.boards[parts.rank]);
        let detector =
            FailureDetector::new(parts.rank, names, timeout, several_boards, monotonic_ms());
        let connection = |(rank, _, stream)| {
            (rank, Connection { stream, incoming: Vec::new(), outgoing: Vec::new() })
        };
        let connections = parts.streams.into_iter().map(connection).collect();
        let (rank, board) = (parts.rank, parts.board);
        HeartbeatThread {
            rank,
            boards: parts.boards,
            board,
            detector,
            connections,
            woken,
            stopping,
            said_goodbye: false,
            _listener: parts.listener,
        }
    }

    fn run(mut self) {
        let mut next_beat = 0;
        loop {
            let now = monotonic_ms();
            if now >= next_beat {
                next_beat = now + BEAT_MS;
                self.board.beat(self.rank);
                self.handle(Event::Tick);
            }
            if let Some(failure) = self.board.alarm() {
                self.handle(Event::Alarm(failure));
                self.board.set_alarm_forwarded(self.rank);
            }
            if self.stopping.load(Ordering::Acquire) && self.may_stop() {
                return;
            }
            self.sleep();
            self.read_all();
        }
    }

    /// Says goodbye. Returns whether the thread may end: rank 0 waits for the others.
    fn may_stop(&mut self) -> bool {
        // An alarm raised since the last check must be sent before the connections close, or the others
        // would take us for the cause.
        if let Some(failure) = self.board.alarm() {
            self.handle(Event::Alarm(failure));
            self.flush();
            return true;
        }
        if self.rank != 0 {
            self.send(0, &ControlMessage::Goodbye);
            self.flush();
            return true;
        }
        if !self.said_goodbye {
            self.said_goodbye = true;
            self.board.set_state(self.rank, RankState::Left);
        }
        self.detector.all_peers_gone()
    }

    fn handle(&mut self, event: Event) {
        let own = RankReport {
            state: self.board.state(self.rank),
            calls: self.board.active_calls(self.rank),
        };
        for action in self.detector.on(event, &own, monotonic_ms()) {
            match action {
                Action::Raise(failure) => {
                    self.board.raise(&failure);
                }
                Action::Send(rank, message) => self.send(rank, &message),
                Action::Mirror(rank, report) => {
                    if self.boards[rank] != self.boards[self.rank] {
                        self.board.mirror(rank, report.state, &report.calls);
                        self.board.beat(rank);
                    }
                }
            }
        }
    }

    fn send(&mut self, rank: usize, message: &ControlMessage) {
        if let Some(connection) = self.connections.get_mut(&rank) {
            connection.outgoing.extend(message.to_frame());
            connection.write();
        }
    }

    /// Waits briefly until the last messages are sent.
    fn flush(&mut self) {
        let until = monotonic_ms() + 500;
        while monotonic_ms() < until && self.connections.values().any(|c| !c.is_flushed()) {
            self.connections.values_mut().for_each(Connection::write);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sleep(&mut self) {
        let mut fds: Vec<libc::pollfd> = vec![readable(self.woken.as_raw_fd())];
        for connection in self.connections.values() {
            let mut fd = readable(connection.stream.as_raw_fd());
            if !connection.is_flushed() {
                fd.events |= libc::POLLOUT;
            }
            fds.push(fd);
        }
        // SAFETY: an array of pollfds with its length.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, CHECK_MS) };
    }

    fn read_all(&mut self) {
        let _ = self.woken.read(&mut [0; 16]);
        let ranks: Vec<usize> = self.connections.keys().copied().collect();
        for rank in ranks {
            let connection = self.connections.get_mut(&rank).expect("just listed");
            connection.write();
            let (messages, open) = connection.read();
            for message in messages {
                self.handle(Event::Received(rank, message));
            }
            if !open {
                self.connections.remove(&rank);
                self.handle(Event::Closed(rank));
            }
        }
    }
}

fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

impl Connection {
    fn is_flushed(&self) -> bool {
        self.outgoing.is_empty() && self.stream.writer.is_flushed()
    }

    /// Writes as much as the kernel accepts. A broken connection is detected by `read`.
    fn write(&mut self) {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(n) if n > 0 => drop(self.outgoing.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                _ => return self.outgoing.clear(),
            }
        }
        let _ = self.stream.flush();
    }

    /// Received messages, and whether the connection is still open. An invalid message closes it.
    fn read(&mut self) -> (Vec<ControlMessage>, bool) {
        let mut open = true;
        let mut piece = [0; 16 << 10];
        loop {
            match self.stream.read(&mut piece) {
                Ok(0) => open = false,
                Ok(n) => {
                    self.incoming.extend(&piece[..n]);
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => open = false,
            }
            break;
        }
        let mut messages = Vec::new();
        loop {
            match ControlMessage::take(&self.incoming) {
                Ok(Some((message, used))) => {
                    self.incoming.drain(..used);
                    messages.push(message);
                }
                Ok(None) => return (messages, open),
                Err(error) => {
                    tracing::warn!("invalid message on a control connection: {error}");
                    return (messages, false);
                }
            }
        }
    }
}
