//! Arbitrary bytes as a peer: for each parser, an acceptor and a dialer, as they are and with the right
//! magic prepended. No peer without the secret is accepted.
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
    for sent in [bytes, &opened, &challenged] {
        let (expect, hello) = (expect(), hello());
        let mut peer = Peer::new(sent);
        assert!(accept(&mut peer, &expect, &secret).is_err());
        assert!(peer.received == 0 || peer.received == CHALLENGE_LEN);
        assert!(dial(&mut Peer::new(sent), &hello, &secret).is_err());
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

/// A peer that sends the fuzzer's bytes and counts received bytes.
struct Peer<'a> {
    sends: &'a [u8],
    received: usize,
}

impl<'a> Peer<'a> {
    fn new(sends: &'a [u8]) -> Peer<'a> {
        Peer { sends, received: 0 }
    }
}

impl Read for Peer<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.sends.read(bytes)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.received += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
