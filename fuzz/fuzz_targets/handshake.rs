//! Any bytes as a peer: to each parser, to an acceptor and to a dialer, whole and with the magic
//! already right so that the fuzzer gets past it. Nobody without the secret gets in.
#![no_main]

use std::io::{self, Read, Write};

use libfuzzer_sys::fuzz_target;
use lockstep_comm::wire::message::*;
use lockstep_comm::wire::*;

fuzz_target!(|bytes: &[u8]| {
    parse_all(bytes);
    let secret = Secret::from_hex(&"42".repeat(32)).expect("64 digits");
    let opened = [b"lockstep", bytes].concat();
    let challenged = [b"LSch", bytes].concat();
    for said in [bytes, &opened, &challenged] {
        let (expect, hello) = (expect(), hello());
        let mut peer = Peer::new(said);
        assert!(accept(&mut peer, &expect, &secret).is_err());
        assert!(peer.heard == 0 || peer.heard == CHALLENGE_LEN);
        assert!(dial(&mut Peer::new(said), &hello, &secret).is_err());
    }
});

fn parse_all(bytes: &[u8]) {
    if let Ok((hello, nonce)) = parse_opening(bytes) {
        assert_eq!(encode_opening(&hello, &nonce), bytes);
    }
    if let Ok(hello) = parse_hello(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
    if let Ok(nonce) = parse_challenge(bytes) {
        assert_eq!(encode_challenge(&nonce), bytes);
    }
    if let Ok(tag) = parse_proof(bytes) {
        assert_eq!(encode_proof(&tag), bytes);
    }
    if let Ok((verdict, tag)) = parse_verdict(bytes) {
        assert_eq!(encode_verdict(&verdict, &tag), bytes);
    }
}

fn hello() -> Hello {
    Hello {
        version: PROTOCOL,
        generation: 3,
        config: [7; 32],
        from: 1,
        to: 0,
        purpose: Purpose::Control,
    }
}

fn expect() -> Expect {
    Expect {
        version: PROTOCOL,
        generation: 3,
        config: [7; 32],
        rank: 0,
    }
}

/// A peer that says what the fuzzer thought of, and only counts what it is told.
struct Peer<'a> {
    says: &'a [u8],
    heard: usize,
}

impl<'a> Peer<'a> {
    fn new(says: &'a [u8]) -> Peer<'a> {
        Peer { says, heard: 0 }
    }
}

impl Read for Peer<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.says.read(bytes)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.heard += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
