//! A SOCKS5 proxy that makes a network slow and unreliable: delays, lost packets, a limited rate, cuts and
//! flipped bits. Works on TCP streams, so it needs no privileges: a lost packet is one that arrives after a
//! retransmission timeout, and everything behind it waits. Used by tests (included by path) and scripts.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Payload of an Ethernet packet.
const PACKET: usize = 1448;
/// Bytes of one connection and direction that may be on their way.
const WINDOW: usize = 4 << 20;
/// Smallest retransmission timeout of Linux.
const RETRANSMIT: Duration = Duration::from_millis(200);

/// State of the network.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conditions {
    /// One way; a round trip takes twice as long.
    pub delay: Duration,
    /// Fraction of lost packets.
    pub loss: f64,
    /// Bytes per second of all connections together.
    pub rate: Option<f64>,
    /// Nothing gets through, and no connection is closed.
    pub cut: bool,
}

impl Conditions {
    /// Applies a command such as `delay=250` or `cut`; `false` if it is unknown.
    pub fn set(&mut self, command: &str) -> bool {
        let (name, value) = command.split_once('=').unwrap_or((command, ""));
        match (name, value.parse::<f64>()) {
            ("delay", Ok(ms)) if (0.0..1e6).contains(&ms) => {
                self.delay = Duration::from_secs_f64(ms / 1e3);
            }
            ("loss", Ok(loss)) if (0.0..1.0).contains(&loss) => self.loss = loss,
            ("rate", Ok(rate)) if rate > 0.0 => self.rate = Some(rate),
            ("cut", _) => self.cut = true,
            ("restore", _) => self.cut = false,
            _ => return false,
        }
        true
    }
}

/// A running proxy. Dropping it closes all its connections.
pub struct Proxy {
    addr: SocketAddr,
    network: Arc<Network>,
}

/// State that all connections share.
struct Network {
    conditions: Mutex<Conditions>,
    /// When the link has sent everything so far.
    free_at: Mutex<Instant>,
    random: AtomicU64,
    bytes: AtomicU64,
    /// Length from which on a piece of data gets a flipped bit; 0 flips none.
    flip: AtomicU64,
    streams: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub fn start(listen: SocketAddr, conditions: Conditions) -> io::Result<Proxy> {
        let listener = TcpListener::bind(listen)?;
        let network = Arc::new(Network {
            conditions: Mutex::new(conditions),
            free_at: Mutex::new(Instant::now()),
            random: AtomicU64::new(1),
            bytes: AtomicU64::new(0),
            flip: AtomicU64::new(0),
            streams: Mutex::default(),
        });
        let proxy = Proxy { addr: listener.local_addr()?, network: network.clone() };
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let network = network.clone();
                // A client that speaks no SOCKS5, or whose target is gone, is closed.
                thread::spawn(move || network.serve(stream));
            }
        });
        Ok(proxy)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Bytes sent through the proxy so far, in all directions.
    pub fn bytes(&self) -> u64 {
        self.network.bytes.load(Ordering::Relaxed)
    }

    /// Changes the conditions, see [`Conditions::set`].
    pub fn change(&self, command: &str) -> bool {
        lock(&self.network.conditions).set(command)
    }

    /// Flips one bit of the next piece of data with at least `len` bytes.
    pub fn flip_a_bit(&self, len: u64) {
        self.network.flip.store(len.max(1), Ordering::Relaxed);
    }

    /// Closes all connections.
    pub fn reset(&self) {
        for stream in lock(&self.network.streams).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.reset();
    }
}

impl Network {
    fn serve(self: Arc<Network>, mut client: TcpStream) -> io::Result<()> {
        let target = read_request(&mut client)?;
        self.wait_while_cut();
        let connected = TcpStream::connect(target);
        // The packets that open a connection need a round trip.
        thread::sleep(2 * (self.conditions().delay + self.loss_delay(1)));
        let refused = u8::from(connected.is_err()) * 5;
        client.write_all(&[5, refused, 0, 1, 0, 0, 0, 0, 0, 0])?;
        let server = connected?;
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
            lock(&self.streams).push(stream.try_clone()?);
        }
        self.forward(client.try_clone()?, server.try_clone()?);
        self.forward(server, client);
        Ok(())
    }

    /// Forwards one direction on two threads: one takes data from the sender, the other delivers it late.
    fn forward(self: &Arc<Network>, mut from: TcpStream, mut to: TcpStream) {
        let queue = Arc::new(Queue::default());
        let (network, arrived) = (self.clone(), queue.clone());
        thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            loop {
                let n = from.read(&mut buffer).unwrap_or(0);
                network.flip_bit(&mut buffer[..n]);
                arrived.push(network.arrival(n), buffer[..n].to_vec());
                if n == 0 {
                    return;
                }
            }
        });
        let network = self.clone();
        thread::spawn(move || {
            loop {
                let (at, bytes) = queue.pop();
                thread::sleep(at.saturating_duration_since(Instant::now()));
                network.wait_while_cut();
                if bytes.is_empty() {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                // If the receiver is gone, the sender learns it from the other direction.
                if to.write_all(&bytes).is_ok() {
                    network.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                }
            }
        });
    }

    fn conditions(&self) -> Conditions {
        *lock(&self.conditions)
    }

    fn wait_while_cut(&self) {
        while self.conditions().cut {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// When `n` bytes that were sent now arrive.
    fn arrival(&self, n: usize) -> Instant {
        let conditions = self.conditions();
        let mut sent = Instant::now();
        if let Some(rate) = conditions.rate {
            let mut free_at = lock(&self.free_at);
            *free_at = sent.max(*free_at) + Duration::from_secs_f64(n as f64 / rate);
            sent = *free_at;
        }
        sent + conditions.delay + self.loss_delay(n.div_ceil(PACKET))
    }

    /// Time until none of these packets is lost any more. The timeout doubles with every retransmission.
    fn loss_delay(&self, packets: usize) -> Duration {
        let conditions = self.conditions();
        let mut timeout = RETRANSMIT.max(2 * conditions.delay);
        let (mut lost, mut delay) = (packets, Duration::ZERO);
        loop {
            lost = (0..lost).filter(|_| self.random() < conditions.loss).count();
            if lost == 0 {
                return delay;
            }
            delay += timeout;
            timeout *= 2;
        }
    }

    /// A number in 0..1 (SplitMix64).
    fn random(&self) -> f64 {
        let mut x = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) as f64 / u64::MAX as f64
    }

    fn flip_bit(&self, bytes: &mut [u8]) {
        let len = self.flip.load(Ordering::Relaxed);
        let wanted = len > 0 && bytes.len() as u64 >= len;
        if wanted
            && self.flip.compare_exchange(len, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            bytes[bytes.len() / 2] ^= 0x10;
        }
    }
}

/// Data on its way, in order.
#[derive(Default)]
struct Queue {
    on_the_way: Mutex<OnTheWay>,
    changed: Condvar,
}

#[derive(Default)]
struct OnTheWay {
    /// Time of arrival and content of each piece.
    pieces: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
}

impl Queue {
    /// Waits until the window has room. A piece never overtakes the one before it.
    fn push(&self, at: Instant, bytes: Vec<u8>) {
        let mut queue = lock(&self.on_the_way);
        while queue.bytes > WINDOW {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let at = queue.pieces.back().map_or(at, |last| at.max(last.0));
        queue.bytes += bytes.len();
        queue.pieces.push_back((at, bytes));
        self.changed.notify_all();
    }

    fn pop(&self) -> (Instant, Vec<u8>) {
        let mut queue = lock(&self.on_the_way);
        loop {
            if let Some((at, bytes)) = queue.pieces.pop_front() {
                queue.bytes -= bytes.len();
                self.changed.notify_all();
                return (at, bytes);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The target of a SOCKS5 request (RFC 1928): CONNECT to an IP address, without authentication.
fn read_request(client: &mut TcpStream) -> io::Result<SocketAddr> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let [5, methods] = read::<2>(client)? else { return Err(invalid()) };
    client.read_exact(&mut vec![0; methods as usize])?;
    client.write_all(&[5, 0])?;
    let ip: IpAddr = match read::<4>(client)? {
        [5, 1, 0, 1] => Ipv4Addr::from(read::<4>(client)?).into(),
        [5, 1, 0, 4] => Ipv6Addr::from(read::<16>(client)?).into(),
        _ => return Err(invalid()),
    };
    Ok((ip, u16::from_be_bytes(read(client)?)).into())
}

fn read<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
