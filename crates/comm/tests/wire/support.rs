//! What the tests share: one job, its secret, and streams that record and damage what is written.

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

/// Rank 1 of generation 3 calls rank 0.
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

/// Rank 0 of generation 3, which [`hello`] suits.
pub fn expect() -> Expect {
    Expect { version: PROTOCOL, generation: 3, config: [7; 32], rank: 0 }
}

/// A stream that keeps what was written to it, and flips one bit of it on the way.
pub struct Tap {
    pub inner: UnixStream,
    pub wrote: Vec<u8>,
    pub flip: Option<usize>,
}

impl Tap {
    pub fn pair(flip_dialer: Option<usize>, flip_acceptor: Option<usize>) -> (Tap, Tap) {
        let (dialer, acceptor) = UnixStream::pair().unwrap();
        (Tap::new(dialer, flip_dialer), Tap::new(acceptor, flip_acceptor))
    }

    pub fn new(inner: UnixStream, flip: Option<usize>) -> Tap {
        let wrote = Vec::new();
        Tap { inner, wrote, flip }
    }
}

impl Read for Tap {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.inner.read(bytes)
    }
}

impl Write for Tap {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut sent = bytes.to_vec();
        let before = self.wrote.len();
        if let Some(bit) = self.flip
            && let Some(byte) = (bit / 8).checked_sub(before).and_then(|at| sent.get_mut(at))
        {
            *byte ^= 1 << (bit % 8);
        }
        self.inner.write_all(&sent)?;
        self.wrote.extend(sent);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// How a handshake ended on both sides, and what each wrote.
pub struct Shaken {
    pub dialer: Result<(), HandshakeError>,
    pub acceptor: Result<Hello, HandshakeError>,
    pub dialer_wrote: Vec<u8>,
    pub acceptor_wrote: Vec<u8>,
}

/// One handshake over a socket pair; each side hangs up when it is done.
pub fn shake(
    (dialer, acceptor): (Tap, Tap),
    (hello, hello_secret): (Hello, Secret),
    (expect, expect_secret): (Expect, Secret),
) -> Shaken {
    let accepting = thread::spawn(move || {
        let mut tap = acceptor;
        (accept(&mut tap, &expect, &expect_secret), tap.wrote)
    });
    let mut tap = dialer;
    let dialer = dial(&mut tap, &hello, &hello_secret);
    let dialer_wrote = std::mem::take(&mut tap.wrote);
    drop(tap);
    let (acceptor, acceptor_wrote) = accepting.join().unwrap();
    Shaken { dialer, acceptor, dialer_wrote, acceptor_wrote }
}

/// A loopback address that no other test uses, so that a port given back stays free.
pub fn loopback() -> SocketAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    ([127, 1, 0, host], 0).into()
}

pub fn short() -> Limits {
    Limits { handshake: Duration::from_millis(200), ..Limits::default() }
}

/// A listener on a port of the system's choice, and the peers it lets in.
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

/// Far enough away that only a hang reaches it.
pub fn patience() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub fn soon(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

/// Waits for what another thread is about to do.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = patience();
    while !holds() {
        assert!(Instant::now() < limit, "never came true: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
