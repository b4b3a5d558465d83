//! A rank's ear: takes connections in, lets each prove itself, and hands on those that did.
//! Never lets a connection that has not proven itself cost more than a short-lived thread, and
//! never lets one hold up another.

use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::deadline::{Deadlined, lift};
use super::handshake::{Expect, answer, authenticate};
use super::message::Hello;
use super::pending::Pending;
use super::refusal::HandshakeError;
use super::secret::Secret;

/// What a listener grants to those that have not proven themselves yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The time for a whole handshake.
    pub handshake: Duration,
    /// Handshakes at once; one more pushes out the oldest.
    pub at_once: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { handshake: Duration::from_secs(5), at_once: 128 }
    }
}

/// A bound port that takes no one in yet.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    /// The same socket once more, to shut it down under the thread that waits on it.
    stop: TcpStream,
    addr: SocketAddr,
}

impl Listener {
    /// Binds `addr`; port 0 lets the system choose one.
    pub fn bind(addr: SocketAddr) -> Result<Listener, ListenError> {
        let socket = TcpListener::bind(addr).map_err(|cause| ListenError::bind(addr, cause))?;
        Listener::from_std(socket)
    }

    /// Takes over a socket that listens already, such as one inherited from a launcher.
    pub fn from_std(socket: TcpListener) -> Result<Listener, ListenError> {
        let parts = || -> io::Result<_> {
            socket.set_nonblocking(false)?;
            let stop = TcpStream::from(OwnedFd::from(socket.try_clone()?));
            Ok((stop, socket.local_addr()?))
        };
        let (stop, addr) = parts().map_err(ListenError::Io)?;
        Ok(Listener { socket, stop, addr })
    }

    /// Where to dial, with the port that the system chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Starts taking connections in, with the default [`Limits`]. `secret` is the job's.
    ///
    /// `on_peer` runs on the connection's own thread, with a stream that has no timeouts and
    /// `TCP_NODELAY` set; it may take its time without holding anyone up.
    pub fn serve(
        self,
        expect: Expect,
        secret: Secret,
        on_peer: impl Fn(Hello, TcpStream, SocketAddr) + Send + Sync + 'static,
    ) -> Result<ListenerHandle, ListenError> {
        self.serve_within(Limits::default(), expect, secret, on_peer)
    }

    /// [`Listener::serve`] with limits of the caller's choice.
    pub fn serve_within(
        self,
        limits: Limits,
        expect: Expect,
        secret: Secret,
        on_peer: impl Fn(Hello, TcpStream, SocketAddr) + Send + Sync + 'static,
    ) -> Result<ListenerHandle, ListenError> {
        let Listener { socket, stop, addr } = self;
        let desk = Arc::new(Desk {
            expect,
            secret,
            handshake: limits.handshake,
            pending: Pending::new(limits.at_once),
            refused: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            on_peer: Box::new(on_peer),
        });
        let at_desk = Arc::clone(&desk);
        let thread = thread::Builder::new()
            .name(format!("listen {}", addr.port()))
            .spawn(move || accept_all(&socket, &at_desk))
            .map_err(ListenError::Io)?;
        Ok(ListenerHandle { addr, desk, stop, thread: Some(thread) })
    }
}

/// A listener at work. Dropping it stops the thread, closes the socket and every connection whose
/// handshake is under way; a peer that has just proven itself may still be handed on.
pub struct ListenerHandle {
    addr: SocketAddr,
    desk: Arc<Desk>,
    stop: TcpStream,
    thread: Option<JoinHandle<()>>,
}

impl ListenerHandle {
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections were turned away or gave up.
    pub fn refused(&self) -> u64 {
        self.desk.refused.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for ListenerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ListenerHandle({})", self.addr)
    }
}

impl Drop for ListenerHandle {
    fn drop(&mut self) {
        self.desk.stopping.store(true, Ordering::Release);
        // On Linux this wakes the thread out of its wait. Where a system cannot shut down a
        // listening socket, the thread is left to end at its next connection.
        let woken = self.stop.shutdown(Shutdown::Both).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // It panics nowhere; and there would be nothing to do about it here.
            let _ = thread.join();
        }
        self.desk.pending.close_all();
    }
}

/// What the threads of one listener share.
struct Desk {
    expect: Expect,
    secret: Secret,
    handshake: Duration,
    pending: Pending,
    refused: AtomicU64,
    stopping: AtomicBool,
    on_peer: Box<dyn Fn(Hello, TcpStream, SocketAddr) + Send + Sync>,
}

impl Desk {
    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// A stopping listener hangs up on everyone; that is no refusal.
    fn refuse(&self, peer: SocketAddr, reason: &dyn fmt::Display) {
        if !self.stopping() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, "refused a connection: {reason}");
        }
    }
}

fn accept_all(socket: &TcpListener, desk: &Arc<Desk>) {
    while !desk.stopping() {
        match socket.accept() {
            Ok((stream, peer)) => greet_apart(stream, peer, desk),
            Err(_) if desk.stopping() => {}
            Err(error) => {
                // Out of descriptors, most likely. They come back as handshakes end, and until
                // then the call fails at once each time.
                tracing::warn!("could not take a connection in: {error}");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Greets on a thread of its own. It owns the deadline, so the thread starts counting now.
fn greet_apart(stream: TcpStream, peer: SocketAddr, desk: &Arc<Desk>) {
    let deadline = Instant::now() + desk.handshake;
    let stream = Arc::new(stream);
    let ticket = desk.pending.enter(&stream);
    let at_desk = Arc::clone(desk);
    let spawned = thread::Builder::new().name("handshake".into()).spawn(move || {
        match greet(stream, ticket, deadline, &at_desk) {
            Ok((hello, stream)) => (at_desk.on_peer)(hello, stream, peer),
            Err(reason) => at_desk.refuse(peer, &reason),
        }
    });
    if let Err(error) = spawned {
        desk.pending.leave(ticket);
        desk.refuse(peer, &format_args!("no thread to greet it: {error}"));
    }
}

/// One connection from accepted to believed.
fn greet(
    stream: Arc<TcpStream>,
    ticket: u64,
    deadline: Instant,
    desk: &Desk,
) -> Result<(Hello, TcpStream), Refused> {
    let mut timed = Deadlined { stream: &stream, deadline };
    let proven = authenticate(&mut timed, &desk.secret);

    // From here the connection is not pushed out any more: a peer that was told "welcome" must
    // not find the door shut.
    if !desk.pending.leave(ticket) {
        return Err(Refused::PushedOut);
    }
    let hello = answer(&mut timed, &proven?, &desk.expect)?;
    lift(&stream).map_err(HandshakeError::Io)?;
    stream.set_nodelay(true).map_err(HandshakeError::Io)?;
    let stream = Arc::into_inner(stream).expect("one that left the queue is shared with no one");
    Ok((hello, stream))
}

enum Refused {
    PushedOut,
    Handshake(HandshakeError),
}

impl From<HandshakeError> for Refused {
    fn from(error: HandshakeError) -> Refused {
        Refused::Handshake(error)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::PushedOut => {
                f.write_str("too many unfinished handshakes at once, and it was the oldest")
            }
            Refused::Handshake(error) => error.fmt(f),
        }
    }
}

/// Why a rank cannot listen.
#[derive(Debug)]
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

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenError::InUse { addr } => write!(
                f,
                "cannot listen on {addr}: the port is in use, perhaps by another run; \
                 stop that one, or choose another port (0 takes any free one)"
            ),
            ListenError::NotLocal { addr } => write!(
                f,
                "cannot listen on {addr}: the address is not this host's; \
                 give an address of one of its network interfaces"
            ),
            ListenError::Denied { addr } => {
                write!(f, "cannot listen on {addr}: not permitted; choose a port above 1023")
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
