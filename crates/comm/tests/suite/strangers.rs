//! Unrelated clients on the ports of a running job: garbage, wrong secrets, replays and idle connections
//! do not disturb the ranks.

use crate::processes::tcp;
use crate::ranks::{Ranks, TestRank, options, spawn};
use lockstep_comm::TokenSource;
use lockstep_comm::wire::{self, Hello, PROTOCOL, Purpose, Secret};
use lockstep_comm::{Error, Op};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

const RANKS: usize = 3;

/// Calls collectives until the test stops it, and checks every result.
fn compute(rank: &TestRank) -> Result<(), Error> {
    let world = rank.join()?;
    rank.mark("joined");
    let mut rounds = 0u64;
    loop {
        let mut buffer = vec![world.rank() as f32; 3000];
        world.all_reduce(&mut buffer, Op::Sum)?;
        assert!(buffer.iter().all(|x| *x == 3.0), "corrupt data in round {rounds}");
        // New groups open new links during the attack.
        let pair = world.split(Some((world.rank() / 2) as i64), 0, "pair")?.expect("a color");
        pair.barrier()?;
        rounds += 1;
        if rounds == 5 {
            rank.mark("fifth-round");
        }
        let mut stop = [u8::from(rank.folder.join("stop").exists())];
        world.broadcast(&mut stop, 0)?;
        if stop[0] == 1 {
            return Ok(());
        }
    }
}

#[test]
fn unrelated_clients_do_not_disturb_a_running_job() {
    let test = "strangers::unrelated_clients_do_not_disturb_a_running_job";
    let Some(mut ranks) = spawn(test, "tcp", tcp(RANKS), options(), compute) else { return };
    ranks.wait_for_mark("joined", 0..RANKS);
    let control = SocketAddr::from(([127, 0, 0, 1], ranks.identities[0].master_port));
    let ports: Vec<SocketAddr> = (0..RANKS).flat_map(|r| listening(ranks.pid(r))).collect();
    assert!(ports.contains(&control), "{ports:?}");
    assert_eq!(
        ports.len(),
        RANKS + 1,
        "one port for links per rank and the control port: {ports:?}"
    );

    let mut idle: Vec<TcpStream> = Vec::new();
    for &port in &ports {
        send_and_read(port, b"GET / HTTP/1.1\r\nHost: lockstep\r\n\r\n");
        send_and_read(port, &[0xff; 100_000]);
        send_and_read(port, b"");
        oversize(port);
        connect_with_wrong_credentials(port, &ranks);
        replay(port, &ranks);
        idle.extend((0..60).filter_map(|_| TcpStream::connect(port).ok()));
    }
    ranks.wait_for_mark("fifth-round", 0..RANKS);
    std::fs::write(ranks.folder.join("stop"), "").expect("the folder exists");
    ranks.expect_success();
    drop(idle);
}

/// Sends bytes and reads until the port closes the connection, or for a short time.
fn send_and_read(port: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(port).expect("the port is open");
    let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
    // The connection may be closed before everything is sent.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// A frame with the maximum length.
fn oversize(port: SocketAddr) {
    let mut frame = b"LKST".to_vec();
    frame.extend([0xff; 60]);
    send_and_read(port, &frame);
}

fn hello(ranks: &Ranks) -> Hello {
    Hello {
        version: PROTOCOL,
        generation: ranks.identities[0].generation,
        config: options().config,
        from: 1,
        to: 0,
        purpose: Purpose::Control,
    }
}

fn secret(ranks: &Ranks) -> Secret {
    let TokenSource::Env(hex) = &ranks.identities[0].token else { panic!("the test sets a token") };
    Secret::from_hex(hex).expect("a valid token")
}

/// Dialers with a wrong secret, configuration or generation.
fn connect_with_wrong_credentials(port: SocketAddr, ranks: &Ranks) {
    let soon = || Instant::now() + Duration::from_millis(300);
    let good = hello(ranks);
    let other = Secret::random().expect("random bytes");
    assert!(wire::connect(port, &good, &other, soon()).is_err());
    let configured = Hello { config: [9; 32], ..good };
    assert!(wire::connect(port, &configured, &secret(ranks), soon()).is_err());
    let newer = Hello { generation: 8, ..good };
    assert!(wire::connect(port, &newer, &secret(ranks), soon()).is_err());
    // A process of the job that is late, or opens a link that nobody uses.
    let _ = wire::connect(port, &good, &secret(ranks), soon());
    let link = Hello { purpose: Purpose::Link { group: 77, lane: 0 }, ..good };
    let _ = wire::connect(port, &link, &secret(ranks), soon());
}

/// Replays the recorded messages of a valid dialer.
fn replay(port: SocketAddr, ranks: &Ranks) {
    let stream = TcpStream::connect(port).expect("the port is open");
    let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
    let mut stream = RecordingStream { stream, sent: Vec::new() };
    let _ = wire::dial(&mut stream, &hello(ranks), &secret(ranks));
    assert!(!stream.sent.is_empty());
    send_and_read(port, &stream.sent);
}

/// A stream that records the written bytes.
struct RecordingStream {
    stream: TcpStream,
    sent: Vec<u8>,
}

impl Read for RecordingStream {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(bytes)
    }
}

impl Write for RecordingStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.stream.write(bytes)?;
        self.sent.extend(&bytes[..n]);
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
