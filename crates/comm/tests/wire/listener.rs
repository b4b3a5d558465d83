//! The listener accepts peers; all others are rejected and disturb nobody.

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

/// Whether the other side closes the connection within `moment`.
fn is_closed(stream: &mut TcpStream, moment: Duration) -> bool {
    stream.set_read_timeout(Some(moment)).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

fn assert_peer_is_accepted(handle: &ListenerHandle, arrived: &std::sync::mpsc::Receiver<Hello>) {
    connect(handle.local_addr(), &hello(), &secret(), far_deadline()).unwrap();
    assert_eq!(arrived.recv_timeout(Duration::from_secs(120)).unwrap(), hello());
}

#[test]
fn a_peer_gets_a_stream_for_frames() {
    let handle = Listener::bind(loopback())
        .unwrap()
        .serve(expect(), secret(), |_hello, mut stream, _addr| {
            assert!(stream.tcp().nodelay().unwrap());
            assert_eq!(stream.tcp().read_timeout().unwrap(), None);
            assert_eq!(stream.tcp().write_timeout().unwrap(), None);
            let (header, payload) = read_frame(&mut stream, CONTROL_LIMIT).unwrap();
            write_frame(&mut stream, &header, &payload).unwrap();
        })
        .unwrap();
    let mut stream = connect(handle.local_addr(), &hello(), &secret(), far_deadline()).unwrap();
    assert!(stream.tcp().nodelay().unwrap());
    assert_eq!(stream.tcp().read_timeout().unwrap(), None);
    let header = FrameHeader { kind: FrameKind::Data, group: 5, sequence: 0, digest: 1, len: 4 };
    write_frame(&mut stream, &header, b"echo").unwrap();
    let echoed = read_frame(&mut stream, CONTROL_LIMIT).unwrap();
    assert_eq!(echoed, (header, b"echo".to_vec()));
    assert_eq!(handle.rejected(), 0);
}

#[test]
fn garbage_is_rejected() {
    let (handle, arrived) = listen(long());
    for (count, garbage) in [vec![b'x'; OPENING_LEN], vec![0xff; 1 << 20]].iter().enumerate() {
        let mut stream = TcpStream::connect(handle.local_addr()).unwrap();
        // The connection may be closed before everything is written.
        let _ = stream.write_all(garbage);
        assert!(is_closed(&mut stream, Duration::from_secs(120)));
        eventually("rejection is counted", || handle.rejected() == count as u64 + 1);
    }
    assert_peer_is_accepted(&handle, &arrived);
}

#[test]
fn an_idle_connection_is_closed_after_the_timeout() {
    let (handle, arrived) = listen(short());
    let mut idle = TcpStream::connect(handle.local_addr()).unwrap();
    assert!(is_closed(&mut idle, Duration::from_secs(120)));
    eventually("rejection is counted", || handle.rejected() == 1);
    assert_peer_is_accepted(&handle, &arrived);
}

#[test]
fn a_slow_sender_does_not_extend_the_timeout() {
    let (handle, _arrived) = listen(short());
    let mut slow = TcpStream::connect(handle.local_addr()).unwrap();
    let mut sent = 0;
    // Each byte is sent within the timeout, but all of them together take much longer.
    while slow.write_all(b"l").is_ok() && !is_closed(&mut slow, Duration::from_millis(100)) {
        sent += 1;
        assert!(sent < OPENING_LEN - 4, "every byte extends the timeout");
    }
    eventually("rejection is counted", || handle.rejected() == 1);
}

#[test]
fn idle_connections_do_not_lock_out_a_peer() {
    let (handle, arrived) = listen(long());
    let idle: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(handle.local_addr()).unwrap()).collect();
    eventually("the oldest are dropped", || handle.rejected() >= 200 - 128);
    assert_peer_is_accepted(&handle, &arrived);
    assert!(handle.rejected() <= 200 - 128 + 10, "more were dropped than necessary");
    drop(idle);
}

#[test]
fn a_continuous_flood_does_not_lock_out_a_peer() {
    let (handle, arrived) = listen(Limits { concurrent: 32, ..long() });
    let addr = handle.local_addr();
    let done = Arc::new(AtomicBool::new(false));
    let flood = thread::spawn({
        let done = Arc::clone(&done);
        move || {
            let mut idle = std::collections::VecDeque::new();
            while !done.load(Ordering::Relaxed) {
                idle.extend(TcpStream::connect(addr));
                if idle.len() > 100 {
                    idle.pop_front();
                }
                // A handshake needs less time than 32 new connections, even on a loaded machine.
                thread::sleep(Duration::from_millis(2));
            }
        }
    });
    eventually("the flood has started", || handle.rejected() > 100);
    for _ in 0..5 {
        assert_peer_is_accepted(&handle, &arrived);
    }
    done.store(true, Ordering::Relaxed);
    flood.join().unwrap();
}

#[test]
fn a_port_in_use_is_reported_with_a_fix() {
    let taken = TcpListener::bind(loopback()).unwrap().local_addr().unwrap();
    let first = Listener::bind(taken).unwrap();
    assert_eq!(first.local_addr(), taken);
    let error = Listener::bind(taken).unwrap_err();
    assert!(matches!(error, ListenError::InUse { addr } if addr == taken), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(&taken.to_string()) && text.contains("another port"), "{text}");
}

#[test]
fn an_address_of_another_host_is_reported() {
    let elsewhere: SocketAddr = "192.0.2.1:0".parse().unwrap();
    let error = Listener::bind(elsewhere).unwrap_err();
    assert!(matches!(error, ListenError::NotLocal { addr } if addr == elsewhere), "{error:?}");
}

#[test]
fn dropping_the_handle_releases_the_port_and_closes_connections() {
    let (handle, _arrived) = listen(long());
    let addr = handle.local_addr();
    let mut idle = TcpStream::connect(addr).unwrap();
    let start = Instant::now();
    drop(handle);
    assert!(start.elapsed() < Duration::from_secs(50), "drop must not wait for handshakes");
    assert!(is_closed(&mut idle, Duration::from_secs(120)));
    let error = TcpStream::connect(addr).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    Listener::bind(addr).unwrap();
}

#[test]
fn a_listening_socket_can_be_inherited() {
    let socket = TcpListener::bind(loopback()).unwrap();
    socket.set_nonblocking(true).unwrap();
    let listener = Listener::from_std(socket).unwrap();
    let handle = listener.serve(expect(), secret(), |_, _, _| {}).unwrap();
    connect(handle.local_addr(), &hello(), &secret(), far_deadline()).unwrap();
}
