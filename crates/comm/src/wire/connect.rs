//! Connects to a rank that may not be listening yet: retries until it answers or the deadline passes.
//! Permanent errors, such as a different configuration, are not retried.
//!
//! An attempt takes three round trips: one for TCP, two for the handshake. Its limit is many times longer than
//! that, since TCP sends lost packets again only after a second or more, and every new attempt starts over.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::deadline::{DeadlineStream, HANDSHAKE, clear_timeouts, tune};
use super::handshake::dial;
use super::handshake_error::HandshakeError;
use super::message::Hello;
use super::secret::Secret;
use super::socks5;
use super::stream::Stream;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A listener that is closing or overloaded closes the connection like one with a different secret. After
/// this many closes in a row we assume a different secret, so that a mistyped token is reported before the
/// deadline.
const MAX_CLOSES: u32 = 5;

/// How often [`connect_while`] checks whether to go on.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The way to a peer: its address, reached directly or through a SOCKS5 proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub addr: SocketAddr,
    pub socks5: Option<SocketAddr>,
}

impl From<SocketAddr> for Route {
    fn from(addr: SocketAddr) -> Route {
        Route { addr, socks5: None }
    }
}

/// [`connect`] for as long as `check`, which is called several times per second, succeeds.
pub fn connect_while<E>(
    route: Route,
    hello: &Hello,
    secret: &Secret,
    deadline: Instant,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<Result<Stream, ConnectError>, E> {
    let (sender, done) = mpsc::channel();
    let (hello, secret) = (*hello, secret.clone());
    // If `check` fails, the thread goes on until its deadline, but nobody waits for it.
    let dial = move || drop(sender.send(connect(route, &hello, &secret, deadline)));
    if let Err(cause) = thread::Builder::new().name("dial".into()).spawn(dial) {
        let cause = AttemptError::Connect(cause);
        return Ok(Err(ConnectError::Permanent { to: hello.to, addr: route.addr, cause }));
    }
    loop {
        match done.recv_timeout(CHECK_INTERVAL) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => check()?,
            Err(RecvTimeoutError::Disconnected) => unreachable!("connecting does not panic"),
        }
    }
}

/// Connects to rank `hello.to` and returns when both sides are authenticated.
/// `secret` is the job's. The stream has `TCP_NODELAY` set and no timeouts.
pub fn connect(
    route: impl Into<Route>,
    hello: &Hello,
    secret: &Secret,
    deadline: Instant,
) -> Result<Stream, ConnectError> {
    let route = route.into();
    let addr = route.addr;
    let start = Instant::now();
    let (mut attempts, mut closes) = (0, 0);
    let mut pause = FIRST_PAUSE;
    let mut last = None;
    while Instant::now() < deadline {
        attempts += 1;
        let cause = match attempt(route, hello, secret, deadline.min(Instant::now() + HANDSHAKE)) {
            Ok(stream) => return Ok(stream),
            Err(cause) => cause,
        };
        closes = match cause {
            AttemptError::Handshake(HandshakeError::ClosedAfterProof) => closes + 1,
            _ => 0,
        };
        if !is_retryable(&cause) || closes == MAX_CLOSES {
            let to = hello.to;
            return Err(ConnectError::Permanent { to, addr, cause });
        }
        tracing::debug!(to = hello.to, %addr, attempts, "no connection yet: {cause}");
        // A timeout of our own deadline says less than the previous error.
        if last.is_none() || !(is_timeout(&cause) && Instant::now() >= deadline) {
            last = Some(cause);
        }
        thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Err(ConnectError::Deadline { to: hello.to, addr, attempts, waited: start.elapsed(), last })
}

fn attempt(
    route: Route,
    hello: &Hello,
    secret: &Secret,
    deadline: Instant,
) -> Result<Stream, AttemptError> {
    // The standard library rejects a timeout of zero.
    let left = deadline.saturating_duration_since(Instant::now());
    let left = left.max(Duration::from_millis(1));
    let first = route.socks5.unwrap_or(route.addr);
    let stream = TcpStream::connect_timeout(&first, left).map_err(AttemptError::Connect)?;
    reject_self_connection(&stream).map_err(AttemptError::Connect)?;
    tune(&stream).map_err(AttemptError::Connect)?;

    let mut timed = DeadlineStream { stream: &stream, deadline };
    if route.socks5.is_some() {
        socks5::request(&mut timed, route.addr).map_err(AttemptError::Connect)?;
    }
    let session = dial(&mut timed, hello, secret).map_err(AttemptError::Handshake)?;
    clear_timeouts(&stream).map_err(AttemptError::Connect)?;
    Ok(Stream::new(Arc::new(stream), session.keys))
}

/// If nobody listens on a port of this host, the system may choose that port as the source port, and TCP
/// then connects the socket to itself.
fn reject_self_connection(stream: &TcpStream) -> io::Result<()> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(()),
    }
}

fn is_timeout(cause: &AttemptError) -> bool {
    match cause {
        AttemptError::Connect(error) => error.kind() == io::ErrorKind::TimedOut,
        AttemptError::Handshake(error) => matches!(error, HandshakeError::TimedOut),
    }
}

/// Whether the same attempt may succeed later: the peer may still be starting, or a process of an older
/// generation may still use its port.
fn is_retryable(cause: &AttemptError) -> bool {
    use HandshakeError::*;
    match cause {
        AttemptError::Connect(error) => !matches!(
            error.kind(),
            io::ErrorKind::PermissionDenied
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::Unsupported
        ),
        AttemptError::Handshake(error) => match error {
            PeerIsOlder { .. } | ClosedAfterProof | Closed | TimedOut | Io(_) => true,
            NotLockstep
            | Malformed(_)
            | WrongSecret
            | UnauthenticatedPeer
            | Version { .. }
            | PeerIsNewer { .. }
            | ConfigDiffers { .. }
            | WrongRank { .. } => false,
        },
    }
}

/// Error of one attempt.
pub enum AttemptError {
    Connect(io::Error),
    Handshake(HandshakeError),
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for AttemptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for AttemptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttemptError::Connect(error) => error.fmt(f),
            AttemptError::Handshake(error) => error.fmt(f),
        }
    }
}

impl AttemptError {
    fn as_error(&self) -> &(dyn std::error::Error + 'static) {
        match self {
            AttemptError::Connect(error) => error,
            AttemptError::Handshake(error) => error,
        }
    }
}

pub enum ConnectError {
    /// The deadline passed; `last` is the error of the last attempt, if there was one.
    Deadline {
        to: u32,
        addr: SocketAddr,
        attempts: u32,
        waited: Duration,
        last: Option<AttemptError>,
    },
    /// Retrying would not help.
    Permanent { to: u32, addr: SocketAddr, cause: AttemptError },
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Deadline { to, addr, attempts, waited, last } => {
                let seconds = waited.as_secs_f64();
                write!(
                    f,
                    "no connection to rank {to} at {addr} after {seconds:.1} s ({attempts} attempts); \
                     check that it is running and that no firewall blocks the port"
                )?;
                match last {
                    Some(cause) => write!(f, "; last error: {cause}"),
                    None => Ok(()),
                }
            }
            ConnectError::Permanent { to, addr, cause } => {
                write!(f, "no connection to rank {to} at {addr}: {cause}")
            }
        }
    }
}

impl std::error::Error for ConnectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ConnectError::Deadline { last, .. } => last.as_ref().map(AttemptError::as_error),
            ConnectError::Permanent { cause, .. } => Some(cause.as_error()),
        }
    }
}
