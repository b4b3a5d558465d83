//! Dialing: what is worth waiting for is waited for, the rest is told at once.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use lockstep_comm::wire::{HandshakeError::*, *};

use crate::support::*;

/// The cause that waiting could not mend.
fn final_cause(result: Result<std::net::TcpStream, ConnectError>) -> HandshakeError {
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
fn a_listener_that_comes_late_is_waited_for() {
    let addr = free_port();
    let dialing = thread::spawn(move || connect(addr, &hello(), &secret(), patience()));
    thread::sleep(Duration::from_millis(50));
    let (_handle, arrived) = listen_at(addr, short(), expect());
    dialing.join().unwrap().unwrap();
    assert_eq!(arrived.recv().unwrap(), hello());
}

#[test]
fn nobody_there_is_told_at_the_deadline() {
    let addr = free_port();
    let error = connect(addr, &hello(), &secret(), soon(100)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ConnectError::Deadline { attempts: 2.., .. }), "{text}");
    assert!(text.contains("rank 0") && text.contains(&addr.to_string()), "{text}");
    // One that has passed already is no reason to try.
    let late = connect(addr, &hello(), &secret(), soon(0)).unwrap_err();
    assert!(matches!(late, ConnectError::Deadline { attempts: 0, .. }), "{late:?}");
}

#[test]
fn an_older_listener_is_waited_out() {
    let (old, _) = listen(short());
    let addr = old.local_addr();
    let newer = Hello { generation: 4, ..hello() };

    // It stays, and the deadline passes.
    let error = connect(addr, &newer, &secret(), soon(100)).unwrap_err();
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

    // It goes, and its successor takes the port.
    let dialing = thread::spawn(move || connect(addr, &newer, &secret(), patience()));
    let before = old.rejected();
    eventually("dialed the old one", || old.rejected() > before);
    drop(old);
    let (_new, arrived) = listen_at(addr, short(), Expect { generation: 4, ..expect() });
    dialing.join().unwrap().unwrap();
    assert_eq!(arrived.recv().unwrap(), newer);
}

#[test]
fn what_waiting_cannot_mend_is_told_at_once() {
    let (handle, arrived) = listen(short());
    let dial = |hello: Hello, secret: Secret| {
        final_cause(connect(handle.local_addr(), &hello, &secret, patience()))
    };
    let old = dial(Hello { generation: 2, ..hello() }, secret());
    assert!(matches!(old, PeerIsNewer { ours: 2, theirs: 3 }), "{old:?}");
    let config = dial(Hello { config: [8; 32], ..hello() }, secret());
    assert!(matches!(config, ConfigDiffers { .. }), "{config:?}");
    let rank = dial(Hello { to: 4, ..hello() }, secret());
    assert!(matches!(rank, WrongRank { dialed: 4, answered: 0 }), "{rank:?}");
    let token = dial(hello(), other_secret());
    assert!(matches!(token, ClosedAfterProof), "{token:?}");

    assert!(arrived.try_recv().is_err(), "none of them got in");
    eventually("all counted", || handle.rejected() == 3 + 5);
}

#[test]
fn a_port_of_something_else_is_told_at_once() {
    let other = TcpListener::bind(loopback()).unwrap();
    let addr = other.local_addr().unwrap();
    let serving = thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(4)).unwrap();
        stream
    });
    let error = final_cause(connect(addr, &hello(), &secret(), patience()));
    assert!(matches!(error, NotLockstep), "{error:?}");
    drop(serving.join());
}
