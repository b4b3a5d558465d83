//! Accepts connections, authenticates each, and passes on the authenticated ones. An unauthenticated
//! connection costs no more than a short-lived thread and does not delay others.

use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::deadline::{DeadlineStream, HANDSHAKE, clear_timeouts, tune};
use super::handshake::{Expect, Session, answer, authenticate};
use super::handshake_error::HandshakeError;
use super::message::Hello;
use super::pending::PendingHandshakes;
use super::secret::Secret;
use super::stream::Stream;
use super::throttle::Throttle;

/// Limits for unauthenticated connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Timeout of a handshake.
    pub handshake: Duration,
    /// Concurrent handshakes; one more drops the oldest.
    pub concurrent: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { handshake: HANDSHAKE, concurrent: 128 }
    }
}

/// A bound socket that does not accept connections yet.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    /// A duplicate of the socket, to shut it down while a thread waits on it.
    stop: TcpStream,
    addr: SocketAddr,
}

impl Listener {
    /// Binds `addr`; with port 0 the system chooses a port.
    pub fn bind(addr: SocketAddr) -> Result<Listener, ListenError> {
        let socket = TcpListener::bind(addr).map_err(|cause| ListenError::bind(addr, cause))?;
        Listener::from_std(socket)
    }

    /// Uses a socket that already listens, such as one inherited from a launcher.
    pub fn from_std(socket: TcpListener) -> Result<Listener, ListenError> {
        let parts = || -> io::Result<_> {
            socket.set_nonblocking(false)?;
            let stop = TcpStream::from(OwnedFd::from(socket.try_clone()?));
            Ok((stop, socket.local_addr()?))
        };
        let (stop, addr) = parts().map_err(ListenError::Io)?;
        Ok(Listener { socket, stop, addr })
    }

    /// The bound address, with the port that the system chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Starts accepting connections, with the default [`Limits`]. `secret` is the job's.
    ///
    /// `on_peer` runs on the connection's own thread, with a stream that has no timeouts and
    /// `TCP_NODELAY` set; it may block without delaying others.
    pub fn serve(
        self,
        expect: Expect,
        secret: Secret,
        on_peer: impl Fn(Hello, Stream, SocketAddr) + Send + Sync + 'static,
    ) -> Result<ListenerHandle, ListenError> {
        self.serve_within(Limits::default(), expect, secret, on_peer)
    }

    /// [`Listener::serve`] with other limits.
    pub fn serve_within(
        self,
        limits: Limits,
        expect: Expect,
        secret: Secret,
        on_peer: impl Fn(Hello, Stream, SocketAddr) + Send + Sync + 'static,
    ) -> Result<ListenerHandle, ListenError> {
        let Listener { socket, stop, addr } = self;
        let acceptor = Arc::new(Acceptor {
            expect,
            secret,
            handshake: limits.handshake,
            pending: PendingHandshakes::new(limits.concurrent),
            rejected: AtomicU64::new(0),
            throttle: Throttle::default(),
            stopping: AtomicBool::new(false),
            on_peer: Box::new(on_peer),
        });
        let shared = Arc::clone(&acceptor);
        let thread = thread::Builder::new()
            .name(format!("listen {}", addr.port()))
            .spawn(move || accept_all(&socket, &shared))
            .map_err(ListenError::Io)?;
        Ok(ListenerHandle { addr, acceptor, stop, thread: Some(thread) })
    }
}

/// A running listener. Dropping it stops the thread, closes the socket and all connections in a handshake;
/// a peer that was just authenticated may still be passed on.
pub struct ListenerHandle {
    addr: SocketAddr,
    acceptor: Arc<Acceptor>,
    stop: TcpStream,
    thread: Option<JoinHandle<()>>,
}

impl ListenerHandle {
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Number of connections that were rejected or gave up.
    pub fn rejected(&self) -> u64 {
        self.acceptor.rejected.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for ListenerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ListenerHandle({})", self.addr)
    }
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.acceptor.stopping.store(true, Ordering::Release);
        // On Linux this wakes the thread. On systems that cannot shut down a listening socket, the thread
        // ends at its next connection.
        let woken = self.stop.shutdown(Shutdown::Both).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // A panic of the thread needs no handling here.
            let _ = thread.join();
        }
        self.acceptor.pending.close_all();
        tracing::debug!(addr = %self.addr, rejected = self.rejected(), "listener closed");
    }
}

/// State that the threads of one listener share.
struct Acceptor {
    expect: Expect,
    secret: Secret,
    handshake: Duration,
    pending: PendingHandshakes,
    rejected: AtomicU64,
    throttle: Throttle,
    stopping: AtomicBool,
    on_peer: Box<dyn Fn(Hello, Stream, SocketAddr) + Send + Sync>,
}

impl Acceptor {
    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Counts and logs a rejection, unless the listener is stopping and closes all connections.
    fn reject(&self, peer: SocketAddr, reason: &dyn fmt::Display) {
        if !self.stopping() {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            self.warn(format_args!("rejected a connection from {peer}: {reason}"));
        }
    }

    /// Logs a warning that anybody can cause.
    fn warn(&self, what: fmt::Arguments) {
        match self.throttle.admit(Instant::now()) {
            Some(0) => tracing::warn!("{what}"),
            Some(omitted) => tracing::warn!("{what} ({omitted} similar warnings omitted)"),
            None => tracing::debug!("{what}"),
        }
    }
}

fn accept_all(socket: &TcpListener, acceptor: &Arc<Acceptor>) {
    while !acceptor.stopping() {
        match socket.accept() {
            Ok((stream, peer)) => spawn_handshake(stream, peer, acceptor),
            Err(_) if acceptor.stopping() => {}
            Err(error) => {
                // Probably out of descriptors. They are freed as handshakes end; until then the call
                // fails immediately.
                acceptor.warn(format_args!("cannot accept a connection: {error}"));
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Runs the handshake on its own thread. The deadline counts from now.
fn spawn_handshake(stream: TcpStream, peer: SocketAddr, acceptor: &Arc<Acceptor>) {
    let deadline = Instant::now() + acceptor.handshake;
    let stream = Arc::new(stream);
    let ticket = acceptor.pending.enter(&stream);
    let shared = Arc::clone(acceptor);
    let spawned =
        thread::Builder::new().name("handshake".into()).spawn(move || {
            match run_handshake(stream, ticket, deadline, &shared) {
                Ok((hello, stream)) => (shared.on_peer)(hello, stream, peer),
                Err(reason) => shared.reject(peer, &reason),
            }
        });
    if let Err(error) = spawned {
        acceptor.pending.leave(ticket);
        acceptor.reject(peer, &format_args!("cannot start a thread: {error}"));
    }
}

/// Authenticates one connection.
fn run_handshake(
    stream: Arc<TcpStream>,
    ticket: u64,
    deadline: Instant,
    acceptor: &Acceptor,
) -> Result<(Hello, Stream), Rejection> {
    let mut timed = DeadlineStream { stream: &stream, deadline };
    let transcript = authenticate(&mut timed, &acceptor.secret);

    // From here on the connection is not dropped any more, because the peer may receive a positive verdict.
    if !acceptor.pending.leave(ticket) {
        return Err(Rejection::Dropped);
    }
    let Session { hello, keys } = answer(&mut timed, &transcript?, &acceptor.expect)?;
    clear_timeouts(&stream).map_err(HandshakeError::Io)?;
    tune(&stream).map_err(HandshakeError::Io)?;
    Ok((hello, Stream::new(stream, keys)))
}

enum Rejection {
    Dropped,
    Handshake(HandshakeError),
}

impl From<HandshakeError> for Rejection {
    fn from(error: HandshakeError) -> Rejection {
        Rejection::Handshake(error)
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rejection::Dropped => f.write_str("too many unfinished handshakes; dropped the oldest"),
            Rejection::Handshake(error) => error.fmt(f),
        }
    }
}

pub enum ListenError {
    InUse { addr: SocketAddr },
    NotLocal { addr: SocketAddr },
    Denied { addr: SocketAddr },
    Io(io::Error),
}

impl ListenError {
    fn bind(addr: SocketAddr, cause: io::Error) -> ListenError {
        match cause.kind() {
            io::ErrorKind::AddrInUse => ListenError::InUse { addr },
            io::ErrorKind::AddrNotAvailable => ListenError::NotLocal { addr },
            io::ErrorKind::PermissionDenied => ListenError::Denied { addr },
            _ => ListenError::Io(cause),
        }
    }
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenError::InUse { addr } => write!(
                f,
                "cannot listen on {addr}: the port is in use, perhaps by another run; \
                 stop that run, or choose another port (0 for any free port)"
            ),
            ListenError::NotLocal { addr } => write!(
                f,
                "cannot listen on {addr}: it is not an address of this host; \
                 use the address of one of its network interfaces"
            ),
            ListenError::Denied { addr } => {
                write!(f, "cannot listen on {addr}: permission denied; use a port above 1023")
            }
            ListenError::Io(cause) => write!(f, "cannot listen: {cause}"),
        }
    }
}

impl std::error::Error for ListenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ListenError::Io(cause) => Some(cause),
            _ => None,
        }
    }
}
