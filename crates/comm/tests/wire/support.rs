//! Helpers: a job with its secret, and streams that record and corrupt written bytes.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use lockstep_comm::wire::*;

pub fn secret() -> Secret {
    Secret::from_hex(&"42".repeat(32)).unwrap()
}

pub fn other_secret() -> Secret {
    Secret::from_hex(&"43".repeat(32)).unwrap()
}

/// Rank 1 of generation 3 connects to rank 0.
pub fn hello() -> Hello {
    Hello {
        version: PROTOCOL,
        generation: 3,
        config: [7; 32],
        from: 1,
        to: 0,
        purpose: Purpose::Link { group: 5, lane: 2 },
    }
}

/// Rank 0 of generation 3, which accepts [`hello`].
pub fn expect() -> Expect {
    Expect { version: PROTOCOL, generation: 3, config: [7; 32], rank: 0 }
}

/// A stream that records written bytes and optionally flips one bit of them.
pub struct RecordingStream {
    pub inner: UnixStream,
    pub written: Vec<u8>,
    pub flip: Option<usize>,
}

impl RecordingStream {
    pub fn pair(
        flip_dialer: Option<usize>,
        flip_acceptor: Option<usize>,
    ) -> (RecordingStream, RecordingStream) {
        let (dialer, acceptor) = UnixStream::pair().unwrap();
        (RecordingStream::new(dialer, flip_dialer), RecordingStream::new(acceptor, flip_acceptor))
    }

    pub fn new(inner: UnixStream, flip: Option<usize>) -> RecordingStream {
        let written = Vec::new();
        RecordingStream { inner, written, flip }
    }
}

impl Read for RecordingStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.inner.read(bytes)
    }
}

impl Write for RecordingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut sent = bytes.to_vec();
        let before = self.written.len();
        if let Some(bit) = self.flip
            && let Some(byte) = (bit / 8).checked_sub(before).and_then(|at| sent.get_mut(at))
        {
            *byte ^= 1 << (bit % 8);
        }
        self.inner.write_all(&sent)?;
        self.written.extend(sent);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Results and written bytes of both sides of a handshake.
pub struct Outcome {
    pub dialer: Result<(), HandshakeError>,
    pub acceptor: Result<Hello, HandshakeError>,
    pub dialer_written: Vec<u8>,
    pub acceptor_written: Vec<u8>,
}

/// One handshake over a socket pair; each side closes it when it is done.
pub fn run_handshake(
    (dialer, acceptor): (RecordingStream, RecordingStream),
    (hello, hello_secret): (Hello, Secret),
    (expect, expect_secret): (Expect, Secret),
) -> Outcome {
    let accepting = thread::spawn(move || {
        let mut tap = acceptor;
        (accept(&mut tap, &expect, &expect_secret).map(|session| session.hello), tap.written)
    });
    let mut tap = dialer;
    let dialer = dial(&mut tap, &hello, &hello_secret).map(drop);
    let dialer_written = std::mem::take(&mut tap.written);
    drop(tap);
    let (acceptor, acceptor_written) = accepting.join().unwrap();
    Outcome { dialer, acceptor, dialer_written, acceptor_written }
}

/// A loopback address that no other test uses, so that a released port stays free.
pub fn loopback() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    ([127, 1, 0, host], 0).into()
}

pub fn long() -> Limits {
    Limits { handshake: Duration::from_secs(60), ..Limits::default() }
}

/// For tests that wait for the timeout of a handshake.
pub fn short() -> Limits {
    Limits { handshake: Duration::from_millis(200), ..Limits::default() }
}

/// A listener on a free port, and the peers that it accepts.
pub fn listen(limits: Limits) -> (ListenerHandle, Receiver<Hello>) {
    listen_at(loopback(), limits, expect())
}

pub fn listen_at(
    addr: SocketAddr,
    limits: Limits,
    expect: Expect,
) -> (ListenerHandle, Receiver<Hello>) {
    let (peers, arrived) = channel();
    let handle = Listener::bind(addr)
        .unwrap()
        .serve_within(limits, expect, secret(), move |hello, _stream, _addr| {
            let _ = peers.send(hello);
        })
        .unwrap();
    (handle, arrived)
}

/// A deadline that only a hang reaches.
pub fn far_deadline() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

pub fn soon(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

/// Waits for a condition that another thread makes true.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = far_deadline();
    while !holds() {
        assert!(Instant::now() < limit, "timed out: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
