//! Strangers at the ports of a running job: garbage, floods, wrong secrets, replays and idlers come
//! and go while the ranks compute, and the job does not notice.

use crate::processes::tcp;
use crate::ranks::{Ranks, Seat, impatient, spawn};
use lockstep_comm::TokenSource;
use lockstep_comm::wire::{self, Hello, PROTOCOL, Purpose, Secret};
use lockstep_comm::{Error, Op};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

const RANKS: usize = 3;

/// Computes until the test says stop, in step, with every result checked.
fn compute(seat: &Seat) -> Result<(), Error> {
    let world = seat.join()?;
    seat.mark("joined");
    let mut rounds = 0u64;
    loop {
        let mut buffer = vec![world.rank() as f32; 3000];
        world.all_reduce(&mut buffer, Op::Sum)?;
        assert!(buffer.iter().all(|x| *x == 3.0), "corrupt data in round {rounds}");
        // New groups take new links while the strangers are at the door.
        let pair = world.split(Some((world.rank() / 2) as i64), 0, "pair")?.expect("a colour");
        pair.barrier()?;
        rounds += 1;
        let mut stop = [u8::from(seat.folder.join("stop").exists())];
        world.broadcast(&mut stop, 0)?;
        if stop[0] == 1 {
            assert!(rounds > 3, "the job hardly ran: {rounds} rounds");
            return Ok(());
        }
    }
}

#[test]
fn strangers_do_not_disturb_a_running_job() {
    let test = "strangers::strangers_do_not_disturb_a_running_job";
    let Some(mut ranks) = spawn(test, "tcp", tcp(RANKS), impatient(), compute) else { return };
    ranks.await_mark("joined", 0..RANKS);
    let control = SocketAddr::from(([127, 0, 0, 1], ranks.identities[0].master_port));
    let ports: Vec<SocketAddr> = (0..RANKS).flat_map(|r| listening(ranks.pid(r))).collect();
    assert!(ports.contains(&control), "{ports:?}");
    assert_eq!(ports.len(), RANKS + 1, "a link port each and the control port: {ports:?}");

    let mut idlers: Vec<TcpStream> = Vec::new();
    for &port in &ports {
        speak(port, b"GET / HTTP/1.1\r\nHost: lockstep\r\n\r\n");
        speak(port, &[0xff; 100_000]);
        speak(port, b"");
        oversize(port);
        refused(port, &ranks);
        replayed(port, &ranks);
        idlers.extend((0..60).filter_map(|_| TcpStream::connect(port).ok()));
    }
    std::thread::sleep(Duration::from_millis(300));
    std::fs::write(ranks.folder.join("stop"), "").expect("the folder is there");
    ranks.end_well();
    drop(idlers);
}

/// Says something and hangs up once it is hung up on, or soon.
fn speak(port: SocketAddr, words: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(port).expect("the port is open");
    let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
    // A refusal may come before all is said.
    let _ = stream.write_all(words);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// A frame that claims to be as long as can be.
fn oversize(port: SocketAddr) {
    let mut frame = b"LKST".to_vec();
    frame.extend([0xff; 60]);
    speak(port, &frame);
}

fn hello(ranks: &Ranks) -> Hello {
    Hello {
        version: PROTOCOL,
        generation: ranks.identities[0].generation,
        config: impatient().config,
        from: 1,
        to: 0,
        purpose: Purpose::Control,
    }
}

fn secret(ranks: &Ranks) -> Secret {
    let TokenSource::Env(hex) = &ranks.identities[0].token else { panic!("the test made one") };
    Secret::from_hex(hex).expect("as made")
}

/// Dialers with another secret, another configuration and of another generation.
fn refused(port: SocketAddr, ranks: &Ranks) {
    let soon = || Instant::now() + Duration::from_millis(300);
    let good = hello(ranks);
    let other = Secret::random().expect("random bytes");
    assert!(wire::connect(port, &good, &other, soon()).is_err());
    let configured = Hello { config: [9; 32], ..good };
    assert!(wire::connect(port, &configured, &secret(ranks), soon()).is_err());
    let newer = Hello { generation: 8, ..good };
    assert!(wire::connect(port, &newer, &secret(ranks), soon()).is_err());
    // One that belongs to the job but comes too late, or for a link that nobody wants.
    let _ = wire::connect(port, &good, &secret(ranks), soon());
    let link = Hello { purpose: Purpose::Link { group: 77, lane: 0 }, ..good };
    let _ = wire::connect(port, &link, &secret(ranks), soon());
}

/// What an honest dialer said once, said again.
fn replayed(port: SocketAddr, ranks: &Ranks) {
    let stream = TcpStream::connect(port).expect("the port is open");
    let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
    let mut tap = Tap { stream, said: Vec::new() };
    let _ = wire::dial(&mut tap, &hello(ranks), &secret(ranks));
    assert!(!tap.said.is_empty());
    speak(port, &tap.said);
}

/// A stream that remembers what was said on it.
struct Tap {
    stream: TcpStream,
    said: Vec<u8>,
}

impl Read for Tap {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(bytes)
    }
}

impl Write for Tap {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.stream.write(bytes)?;
        self.said.extend(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// The loopback ports that a process listens on.
fn listening(pid: u32) -> Vec<SocketAddr> {
    let own = sockets_of(pid);
    let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux has it");
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // sl, local address, remote address, state (0A: listening), …, inode.
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let port = u16::from_str_radix(local.split(':').nth(1)?, 16).ok()?;
        (*state == "0A" && own.contains(&inode.to_string())).then_some(port)
    };
    table.lines().filter_map(port).map(|p| SocketAddr::from(([127, 0, 0, 1], p))).collect()
}

/// The inodes of the sockets that a process has open.
fn sockets_of(pid: u32) -> Vec<String> {
    let folder = format!("/proc/{pid}/fd");
    let entries = std::fs::read_dir(Path::new(&folder)).expect("the process runs");
    let target = |entry: std::io::Result<std::fs::DirEntry>| {
        let link = std::fs::read_link(entry.ok()?.path()).ok()?;
        Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_string())
    };
    entries.filter_map(target).collect()
}
