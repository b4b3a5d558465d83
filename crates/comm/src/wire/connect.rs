//! Dialing a rank that may not be there yet: again and again, until it answers or time is up.
//! Never tries again what waiting cannot mend, such as a different configuration.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::deadline::{Deadlined, lift};
use super::handshake::dial;
use super::message::Hello;
use super::refusal::HandshakeError;
use super::secret::Secret;

/// How long one attempt may take, so that a host that swallows packets is dialed anew.
const ATTEMPT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A listener that is closing, or flooded, hangs up like one with another secret. The latter is
/// believed when it happens this many times in a row, rather than at the deadline: a mistyped
/// token should not take a minute to be told.
const HANG_UPS_BELIEVED: u32 = 5;

/// Connects to the rank `hello.to` at `addr`, and returns once both sides have proven themselves.
/// `secret` is the job's. The stream has `TCP_NODELAY` set and no timeouts.
pub fn connect(
    addr: SocketAddr,
    hello: &Hello,
    secret: &Secret,
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    let start = Instant::now();
    let (mut attempts, mut hang_ups) = (0, 0);
    let mut pause = FIRST_PAUSE;
    let mut last = None;
    while Instant::now() < deadline {
        attempts += 1;
        let cause = match attempt(addr, hello, secret, deadline.min(Instant::now() + ATTEMPT)) {
            Ok(stream) => return Ok(stream),
            Err(cause) => cause,
        };
        hang_ups = match cause {
            Cause::Handshake(HandshakeError::HungUpOnProof) => hang_ups + 1,
            _ => 0,
        };
        if !may_pass(&cause) || hang_ups == HANG_UPS_BELIEVED {
            let to = hello.to;
            return Err(ConnectError::Final { to, addr, cause });
        }
        tracing::debug!(to = hello.to, %addr, attempts, "no connection yet: {cause}");
        last = Some(cause);
        thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Err(ConnectError::Deadline { to: hello.to, addr, attempts, waited: start.elapsed(), last })
}

fn attempt(
    addr: SocketAddr,
    hello: &Hello,
    secret: &Secret,
    deadline: Instant,
) -> Result<TcpStream, Cause> {
    // The least that is a timeout: zero is none, and the standard library refuses it.
    let left = deadline.saturating_duration_since(Instant::now());
    let left = left.max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&addr, left).map_err(Cause::Connect)?;
    refuse_self(&stream).map_err(Cause::Connect)?;
    stream.set_nodelay(true).map_err(Cause::Connect)?;

    let mut timed = Deadlined { stream: &stream, deadline };
    dial(&mut timed, hello, secret).map_err(Cause::Handshake)?;
    lift(&stream).map_err(Cause::Connect)?;
    Ok(stream)
}

/// When nobody listens on a port of this host, the system may pick that very port to dial from,
/// and TCP then connects the socket to itself.
fn refuse_self(stream: &TcpStream) -> io::Result<()> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(()),
    }
}

/// Whether the same attempt may succeed later: the peer is still starting, or one of an older
/// generation still sits on its port.
fn may_pass(cause: &Cause) -> bool {
    use HandshakeError::*;
    match cause {
        Cause::Connect(error) => !matches!(
            error.kind(),
            io::ErrorKind::PermissionDenied
                | io::ErrorKind::InvalidInput
                | io::ErrorKind::Unsupported
        ),
        Cause::Handshake(error) => match error {
            PeerIsOlder { .. } | HungUpOnProof | Closed | TimedOut | Io(_) => true,
            NotLockstep
            | Malformed(_)
            | WrongSecret
            | Impostor
            | Version { .. }
            | PeerIsNewer { .. }
            | ConfigDiffers { .. }
            | WrongRank { .. } => false,
        },
    }
}

/// Why one attempt failed.
#[derive(Debug)]
pub enum Cause {
    Connect(io::Error),
    Handshake(HandshakeError),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Connect(error) => error.fmt(f),
            Cause::Handshake(error) => error.fmt(f),
        }
    }
}

impl Cause {
    fn as_error(&self) -> &(dyn std::error::Error + 'static) {
        match self {
            Cause::Connect(error) => error,
            Cause::Handshake(error) => error,
        }
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectError {
    /// Time is up; `last` is what the last attempt met, if there was time for one.
    Deadline { to: u32, addr: SocketAddr, attempts: u32, waited: Duration, last: Option<Cause> },
    /// Waiting longer would not have helped.
    Final { to: u32, addr: SocketAddr, cause: Cause },
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Deadline { to, addr, attempts, waited, last } => {
                let seconds = waited.as_secs_f64();
                write!(
                    f,
                    "no connection to rank {to} at {addr} in {seconds:.1} s ({attempts} attempts); \
                     check that it was started and that no firewall stands between"
                )?;
                match last {
                    Some(cause) => write!(f, "; last: {cause}"),
                    None => Ok(()),
                }
            }
            ConnectError::Final { to, addr, cause } => {
                write!(f, "no connection to rank {to} at {addr}: {cause}")
            }
        }
    }
}

impl std::error::Error for ConnectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ConnectError::Deadline { last, .. } => last.as_ref().map(Cause::as_error),
            ConnectError::Final { cause, .. } => Some(cause.as_error()),
        }
    }
}
