//! The listener: peers get in, everyone else is turned away and disturbs nobody.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lockstep_comm::wire::frame::CONTROL_LIMIT;
use lockstep_comm::wire::message::OPENING_LEN;
use lockstep_comm::wire::*;

use crate::support::*;

fn long() -> Limits {
    Limits { handshake: Duration::from_secs(60), ..Limits::default() }
}

/// Whether the other side has hung up, waiting a moment for it.
fn hung_up(stream: &mut TcpStream, moment: Duration) -> bool {
    stream.set_read_timeout(Some(moment)).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

fn assert_peer_gets_in(handle: &ListenerHandle, arrived: &std::sync::mpsc::Receiver<Hello>) {
    connect(handle.local_addr(), &hello(), &secret(), patience()).unwrap();
    assert_eq!(arrived.recv_timeout(Duration::from_secs(20)).unwrap(), hello());
}

#[test]
fn a_peer_gets_a_stream_that_carries_frames() {
    let handle = Listener::bind(loopback())
        .unwrap()
        .serve(expect(), secret(), |_hello, mut stream, _addr| {
            assert!(stream.nodelay().unwrap());
            assert_eq!(stream.read_timeout().unwrap(), None);
            assert_eq!(stream.write_timeout().unwrap(), None);
            let (header, payload) = read_frame(&mut stream, CONTROL_LIMIT).unwrap();
            write_frame(&mut stream, &header, &payload).unwrap();
        })
        .unwrap();
    let mut stream = connect(handle.local_addr(), &hello(), &secret(), patience()).unwrap();
    assert!(stream.nodelay().unwrap());
    assert_eq!(stream.read_timeout().unwrap(), None);
    let header = FrameHeader { kind: FrameKind::Data, group: 5, sequence: 0, digest: 1, len: 4 };
    write_frame(&mut stream, &header, b"echo").unwrap();
    let echoed = read_frame(&mut stream, CONTROL_LIMIT).unwrap();
    assert_eq!(echoed, (header, b"echo".to_vec()));
    assert_eq!(handle.rejected(), 0);
}

#[test]
fn garbage_and_oversize_are_turned_away() {
    let (handle, arrived) = listen(long());
    for (count, garbage) in [vec![b'x'; OPENING_LEN], vec![0xff; 1 << 20]].iter().enumerate() {
        let mut stream = TcpStream::connect(handle.local_addr()).unwrap();
        // It may be closed before all is written; that is as good an end.
        let _ = stream.write_all(garbage);
        assert!(hung_up(&mut stream, Duration::from_secs(20)));
        eventually("counted", || handle.rejected() == count as u64 + 1);
    }
    assert_peer_gets_in(&handle, &arrived);
}

#[test]
fn an_idle_connection_is_dropped_at_the_deadline() {
    let (handle, arrived) = listen(short());
    let mut idle = TcpStream::connect(handle.local_addr()).unwrap();
    assert!(hung_up(&mut idle, Duration::from_secs(20)));
    eventually("counted", || handle.rejected() == 1);
    assert_peer_gets_in(&handle, &arrived);
}

#[test]
fn a_drip_does_not_stretch_the_deadline() {
    let (handle, _arrived) = listen(short());
    let mut drip = TcpStream::connect(handle.local_addr()).unwrap();
    let mut dripped = 0;
    // Each byte comes well within the deadline; all of them together do not.
    while drip.write_all(b"l").is_ok() && !hung_up(&mut drip, Duration::from_millis(20)) {
        dripped += 1;
        assert!(dripped < OPENING_LEN / 2, "the listener waits for every byte anew");
    }
    eventually("counted", || handle.rejected() == 1);
}

#[test]
fn a_flood_of_idle_connections_does_not_lock_a_peer_out() {
    let (handle, arrived) = listen(long());
    let idle: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(handle.local_addr()).unwrap()).collect();
    eventually("the oldest are pushed out", || handle.rejected() >= 200 - 128);
    assert_peer_gets_in(&handle, &arrived);
    assert!(handle.rejected() <= 200 - 128 + 1, "more were pushed out than had to be");
    drop(idle);
}

#[test]
fn a_flood_that_goes_on_does_not_lock_a_peer_out() {
    let (handle, arrived) = listen(Limits { concurrent: 32, ..long() });
    let addr = handle.local_addr();
    let over = Arc::new(AtomicBool::new(false));
    let flood = thread::spawn({
        let over = Arc::clone(&over);
        move || {
            let mut idle = std::collections::VecDeque::new();
            while !over.load(Ordering::Relaxed) {
                idle.extend(TcpStream::connect(addr));
                if idle.len() > 100 {
                    idle.pop_front();
                }
            }
        }
    });
    eventually("the flood is on", || handle.rejected() > 100);
    for _ in 0..5 {
        assert_peer_gets_in(&handle, &arrived);
    }
    over.store(true, Ordering::Relaxed);
    flood.join().unwrap();
}

#[test]
fn a_port_in_use_is_named_with_the_way_out() {
    let taken = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let first = Listener::bind(taken).unwrap();
    assert_eq!(first.local_addr(), taken);
    let error = Listener::bind(taken).unwrap_err();
    assert!(matches!(error, ListenError::InUse { addr } if addr == taken), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(&taken.to_string()) && text.contains("another port"), "{text}");
}

#[test]
fn an_address_of_another_host_is_named() {
    let elsewhere: SocketAddr = "192.0.2.1:0".parse().unwrap();
    let error = Listener::bind(elsewhere).unwrap_err();
    assert!(matches!(error, ListenError::NotLocal { addr } if addr == elsewhere), "{error:?}");
}

#[test]
fn dropping_the_handle_frees_the_port_and_hangs_up() {
    let (handle, _arrived) = listen(long());
    let addr = handle.local_addr();
    let mut idle = TcpStream::connect(addr).unwrap();
    let start = Instant::now();
    drop(handle);
    assert!(start.elapsed() < Duration::from_secs(5), "a drop does not wait for a deadline");
    assert!(hung_up(&mut idle, Duration::from_secs(20)));
    let refused = TcpStream::connect(addr).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    Listener::bind(addr).unwrap();
}

#[test]
fn a_listening_socket_can_be_taken_over() {
    let socket = TcpListener::bind(loopback()).unwrap();
    socket.set_nonblocking(true).unwrap();
    let listener = Listener::from_std(socket).unwrap();
    let handle = listener.serve(expect(), secret(), |_, _, _| {}).unwrap();
    connect(handle.local_addr(), &hello(), &secret(), patience()).unwrap();
}
