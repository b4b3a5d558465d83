//! Connecting: retryable errors are retried, permanent ones are returned immediately.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use lockstep_comm::wire::{HandshakeError::*, *};

use crate::support::*;

/// The cause of a permanent error.
fn permanent_cause(result: Result<Stream, ConnectError>) -> HandshakeError {
    match result {
        Err(ConnectError::Permanent { cause: AttemptError::Handshake(cause), .. }) => cause,
        other => panic!("{other:?}"),
    }
}

/// A port that nobody listens on.
fn free_port() -> SocketAddr {
    TcpListener::bind(loopback()).unwrap().local_addr().unwrap()
}

#[test]
fn a_late_listener_is_waited_for() {
    let addr = free_port();
    let dialing = thread::spawn(move || connect(addr, &hello(), &secret(), far_deadline()));
    thread::sleep(Duration::from_millis(50));
    let (_handle, arrived) = listen_at(addr, long(), expect());
    dialing.join().unwrap().unwrap();
    assert_eq!(arrived.recv().unwrap(), hello());
}

#[test]
fn no_listener_is_reported_at_the_deadline() {
    let addr = free_port();
    let error = connect(addr, &hello(), &secret(), soon(2000)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ConnectError::Deadline { attempts: 2.., .. }), "{text}");
    assert!(text.contains("rank 0") && text.contains(&addr.to_string()), "{text}");
    // No attempt is made after the deadline.
    let late = connect(addr, &hello(), &secret(), soon(0)).unwrap_err();
    assert!(matches!(late, ConnectError::Deadline { attempts: 0, .. }), "{late:?}");
}

#[test]
fn a_listener_of_an_older_generation_is_retried() {
    let (old, _) = listen(long());
    let addr = old.local_addr();
    let newer = Hello { generation: 4, ..hello() };

    // It keeps running, and the deadline passes.
    let error = connect(addr, &newer, &secret(), soon(2000)).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectError::Deadline {
                last: Some(AttemptError::Handshake(PeerIsOlder { ours: 4, theirs: 3 })),
                ..
            }
        ),
        "{error}"
    );

    // It ends, and its successor uses the port.
    let dialing = thread::spawn(move || connect(addr, &newer, &secret(), far_deadline()));
    let before = old.rejected();
    eventually("connected to the old listener", || old.rejected() > before);
    drop(old);
    let (_new, arrived) = listen_at(addr, long(), Expect { generation: 4, ..expect() });
    dialing.join().unwrap().unwrap();
    assert_eq!(arrived.recv().unwrap(), newer);
}

#[test]
fn permanent_errors_are_returned_immediately() {
    let (handle, arrived) = listen(long());
    let dial = |hello: Hello, secret: Secret| {
        permanent_cause(connect(handle.local_addr(), &hello, &secret, far_deadline()))
    };
    let old = dial(Hello { generation: 2, ..hello() }, secret());
    assert!(matches!(old, PeerIsNewer { ours: 2, theirs: 3 }), "{old:?}");
    let config = dial(Hello { config: [8; 32], ..hello() }, secret());
    assert!(matches!(config, ConfigDiffers { .. }), "{config:?}");
    let rank = dial(Hello { to: 4, ..hello() }, secret());
    assert!(matches!(rank, WrongRank { dialed: 4, answered: 0 }), "{rank:?}");
    let token = dial(hello(), other_secret());
    assert!(matches!(token, ClosedAfterProof), "{token:?}");

    assert!(arrived.try_recv().is_err(), "none of them is accepted");
    eventually("all are counted", || handle.rejected() == 3 + 5);
}

#[test]
fn a_port_of_another_program_is_reported_immediately() {
    let other = TcpListener::bind(loopback()).unwrap();
    let addr = other.local_addr().unwrap();
    let serving = thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4)).unwrap();
        stream
    });
    let error = permanent_cause(connect(addr, &hello(), &secret(), far_deadline()));
    assert!(matches!(error, NotLockstep), "{error:?}");
    drop(serving.join());
}
