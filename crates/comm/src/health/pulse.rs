//! The heartbeat of a rank that is a process: a thread that gives signs of life, listens for those of
//! others, and passes alarms on. Moves bytes and keeps time; what to make of it is decided in `vigil`.

use crate::health::board::{Board, State, monotonic_ms};
use crate::health::vigil::{Act, Event, Vigil};
use crate::health::word::Word;
use crate::wire::ListenerHandle;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a sign of life is given.
const BEAT_MS: u64 = 500;
/// How often the board is looked at for an alarm that other hosts must hear of.
const LOOK_MS: i32 = 100;

pub(crate) struct PulseParts {
    pub rank: usize,
    pub board: Arc<Board>,
    /// A connection with each peer, and how the peer is called.
    pub streams: Vec<(usize, String, TcpStream)>,
    pub heartbeat: Duration,
    /// Which board each rank writes on: what ranks of other boards say is copied onto ours.
    pub boards: Vec<usize>,
    /// At rank 0, the port that ranks joined by: open for as long as the world stands, so that
    /// strangers and leftovers of an old generation are turned away and told why.
    pub listener: Option<ListenerHandle>,
}

/// Stops on drop: says goodbye first, and at rank 0 waits until all others have left as well, since
/// they have nobody else to watch over them.
pub(crate) struct Pulse {
    stopping: Arc<AtomicBool>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Pulse {
    pub(crate) fn start(parts: PulseParts) -> std::io::Result<Pulse> {
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        for (_, _, stream) in &parts.streams {
            stream.set_nonblocking(true)?;
        }
        let stopping = Arc::new(AtomicBool::new(false));
        let flag = stopping.clone();
        let thread = std::thread::Builder::new()
            .name("lockstep-pulse".into())
            .spawn(move || Heart::new(parts, woken, flag).run())?;
        Ok(Pulse { stopping, wake, thread: Some(thread) })
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // If the thread is gone there is nobody to wake.
        let _ = self.wake.write_all(&[0]);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Heart {
    rank: usize,
    boards: Vec<usize>,
    board: Arc<Board>,
    vigil: Vigil,
    connections: BTreeMap<usize, Connection>,
    woken: UnixStream,
    stopping: Arc<AtomicBool>,
    said_goodbye: bool,
    _listener: Option<ListenerHandle>,
}

struct Connection {
    stream: TcpStream,
    incoming: Vec<u8>,
    /// What the kernel would not take yet.
    outgoing: Vec<u8>,
}

impl Heart {
    fn new(parts: PulseParts, woken: UnixStream, stopping: Arc<AtomicBool>) -> Heart {
        let names = parts.streams.iter().map(|(rank, name, _)| (*rank, name.clone())).collect();
        let heartbeat = parts.heartbeat.as_millis() as u64;
        let spread = parts.boards.iter().any(|h| *h != parts.boards[parts.rank]);
        let vigil = Vigil::new(parts.rank, names, heartbeat, spread, monotonic_ms());
        let connection = |(rank, _, stream)| {
            (rank, Connection { stream, incoming: Vec::new(), outgoing: Vec::new() })
        };
        let connections = parts.streams.into_iter().map(connection).collect();
        let (rank, board) = (parts.rank, parts.board);
        Heart {
            rank,
            boards: parts.boards,
            board,
            vigil,
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
                self.board.set_told(self.rank);
            }
            if self.stopping.load(Ordering::Acquire) && self.may_stop() {
                return;
            }
            self.sleep();
            self.read_all();
        }
    }

    /// Says goodbye once; after that the others go, and rank 0 waits for them.
    fn may_stop(&mut self) -> bool {
        // Whatever was raised since we last looked must leave before the connections close, or the
        // others would take us for the reason.
        if let Some(failure) = self.board.alarm() {
            self.handle(Event::Alarm(failure));
            self.flush();
            return true;
        }
        if self.rank != 0 {
            self.tell(0, &Word::Goodbye);
            self.flush();
            return true;
        }
        if !self.said_goodbye {
            self.said_goodbye = true;
            self.board.set_state(self.rank, State::Left);
        }
        self.vigil.alone()
    }

    fn handle(&mut self, event: Event) {
        let own = (self.board.state(self.rank), self.board.doing(self.rank));
        for act in self.vigil.on(event, &own, monotonic_ms()) {
            match act {
                Act::Raise(failure) => {
                    self.board.raise(&failure);
                }
                Act::Tell(rank, word) => self.tell(rank, &word),
                Act::Mirror(rank, state, doing) => {
                    if self.boards[rank] != self.boards[self.rank] {
                        self.board.mirror(rank, state, &doing);
                        self.board.beat(rank);
                    }
                }
            }
        }
    }

    fn tell(&mut self, rank: usize, word: &Word) {
        if let Some(connection) = self.connections.get_mut(&rank) {
            connection.outgoing.extend(word.to_frame());
            connection.write();
        }
    }

    /// Gives the last words a moment to leave.
    fn flush(&mut self) {
        let until = monotonic_ms() + 500;
        while monotonic_ms() < until && self.connections.values().any(|c| !c.outgoing.is_empty()) {
            self.connections.values_mut().for_each(Connection::write);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sleep(&mut self) {
        let mut fds: Vec<libc::pollfd> = vec![readable(self.woken.as_raw_fd())];
        for connection in self.connections.values() {
            let mut fd = readable(connection.stream.as_raw_fd());
            if !connection.outgoing.is_empty() {
                fd.events |= libc::POLLOUT;
            }
            fds.push(fd);
        }
        // SAFETY: an array of pollfds with its length.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, LOOK_MS) };
    }

    fn read_all(&mut self) {
        let _ = self.woken.read(&mut [0; 16]);
        let ranks: Vec<usize> = self.connections.keys().copied().collect();
        for rank in ranks {
            let connection = self.connections.get_mut(&rank).expect("just listed");
            connection.write();
            let (words, open) = connection.read();
            for word in words {
                self.handle(Event::Heard(rank, word));
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
    /// Writes what the kernel takes. A broken connection shows when it is read.
    fn write(&mut self) {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(n) if n > 0 => drop(self.outgoing.drain(..n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                _ => return self.outgoing.clear(),
            }
        }
    }

    /// The words that have come in, and whether the connection is still open. One that speaks
    /// nonsense counts as closed.
    fn read(&mut self) -> (Vec<Word>, bool) {
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
        let mut words = Vec::new();
        loop {
            match Word::take(&self.incoming) {
                Ok(Some((word, used))) => {
                    self.incoming.drain(..used);
                    words.push(word);
                }
                Ok(None) => return (words, open),
                Err(error) => {
                    tracing::warn!("a control connection speaks nonsense: {error}");
                    return (words, false);
                }
            }
        }
    }
}
