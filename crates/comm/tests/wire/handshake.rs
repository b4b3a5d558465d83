//! The handshake: which peers are accepted, rejected with a reason, or rejected without an answer.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use hmac::{Hmac, Mac};
use lockstep_comm::wire::message::*;
use lockstep_comm::wire::{HandshakeError::*, *};
use sha2::Sha256;

use crate::support::*;

fn handrun_handshake(hello: Hello, expect: Expect) -> Outcome {
    run_handshake(RecordingStream::pair(None, None), (hello, secret()), (expect, secret()))
}

#[test]
fn both_sides_with_the_secret_accept() {
    for purpose in [Purpose::Control, Purpose::Link { group: u64::MAX, lane: 9 }] {
        let hello = Hello { purpose, ..hello() };
        let done = handrun_handshake(hello, expect());
        done.dialer.unwrap();
        assert_eq!(done.acceptor.unwrap(), hello);
        let sent = OPENING_LEN + PROOF_LEN + CONFIRMATION.len();
        assert_eq!(done.dialer_written.len(), sent);
        assert_eq!(done.acceptor_written.len(), CHALLENGE_LEN + VERDICT_LEN);
    }
}

#[test]
fn a_peer_without_the_secret_gets_no_answer() {
    // Even if its generation would be rejected as well.
    let hello = Hello { generation: 1, ..hello() };
    let done = run_handshake(
        RecordingStream::pair(None, None),
        (hello, other_secret()),
        (expect(), secret()),
    );
    assert!(matches!(done.dialer, Err(ClosedAfterProof)), "{:?}", done.dialer);
    assert!(matches!(done.acceptor, Err(WrongSecret)), "{:?}", done.acceptor);
    assert_eq!(done.acceptor_written.len(), CHALLENGE_LEN);
    assert!(done.dialer.unwrap_err().to_string().contains("LOCKSTEP_TOKEN"));
}

#[test]
fn rejections_contain_the_values_of_both_sides() {
    let rejected = |hello, expect| {
        let done = handrun_handshake(hello, expect);
        (done.dialer.unwrap_err(), done.acceptor.unwrap_err())
    };
    let newer = Expect { generation: 4, ..expect() };
    let (dialer, acceptor) = rejected(hello(), newer);
    assert!(matches!(dialer, PeerIsNewer { ours: 3, theirs: 4 }), "{dialer:?}");
    assert!(matches!(acceptor, PeerIsOlder { ours: 4, theirs: 3 }), "{acceptor:?}");

    let older = Expect { generation: 2, ..expect() };
    let (dialer, acceptor) = rejected(hello(), older);
    assert!(matches!(dialer, PeerIsOlder { ours: 3, theirs: 2 }), "{dialer:?}");
    assert!(matches!(acceptor, PeerIsNewer { ours: 2, theirs: 3 }), "{acceptor:?}");

    let mut config = [7; 32];
    config[7] = 8;
    let (dialer, acceptor) = rejected(hello(), Expect { config, ..expect() });
    let (a, b) = (0x0707_0707_0707_0707, 0x0707_0707_0707_0708);
    assert!(matches!(dialer, ConfigDiffers { ours, theirs } if (ours, theirs) == (a, b)));
    assert!(matches!(acceptor, ConfigDiffers { ours, theirs } if (ours, theirs) == (b, a)));

    let (dialer, acceptor) = rejected(hello(), Expect { rank: 5, ..expect() });
    assert!(matches!(dialer, WrongRank { dialed: 0, answered: 5 }), "{dialer:?}");
    assert!(matches!(acceptor, WrongRank { dialed: 0, answered: 5 }), "{acceptor:?}");

    let (dialer, acceptor) = rejected(Hello { version: 99, ..hello() }, expect());
    assert!(matches!(dialer, Version { ours: 99, theirs: PROTOCOL }), "{dialer:?}");
    assert!(matches!(acceptor, Version { ours: PROTOCOL, theirs: 99 }), "{acceptor:?}");
}

#[test]
fn an_old_generation_is_reported_first() {
    let other = Expect { generation: 4, config: [9; 32], rank: 6, ..expect() };
    let done = handrun_handshake(hello(), other);
    assert!(matches!(done.dialer, Err(PeerIsNewer { .. })), "{:?}", done.dialer);
}

#[test]
fn a_replayed_dialer_is_rejected() {
    let recorded = handrun_handshake(hello(), expect()).dialer_written;
    let (mut replayed, acceptor) = UnixStream::pair().unwrap();
    replayed.write_all(&recorded).unwrap();
    let mut acceptor = RecordingStream::new(acceptor, None);
    let result = accept(&mut acceptor, &expect(), &secret());
    assert!(matches!(result, Err(WrongSecret)), "{result:?}");
    assert_eq!(acceptor.written.len(), CHALLENGE_LEN);
}

#[test]
fn a_replayed_acceptor_is_rejected() {
    let recorded = handrun_handshake(hello(), expect()).acceptor_written;
    let (mut dialer, mut replayed) = UnixStream::pair().unwrap();
    replayed.write_all(&recorded).unwrap();
    let result = dial(&mut dialer, &hello(), &secret());
    assert!(matches!(result, Err(UnauthenticatedPeer)), "{result:?}");
}

#[test]
fn a_mirrored_dialer_is_rejected() {
    let (mut dialer, mut mirror) = UnixStream::pair().unwrap();
    let mirroring = thread::spawn(move || {
        let mut received = [0; OPENING_LEN];
        mirror.read_exact(&mut received).unwrap();
        mirror.write_all(&received).unwrap();
    });
    let result = dial(&mut dialer, &hello(), &secret());
    assert!(matches!(result, Err(NotLockstep)), "{result:?}");
    mirroring.join().unwrap();
}

/// A dialer that has only `key` and sends `hello`.
fn dial_with_key(hello: Hello, key: &Secret) -> Result<Hello, HandshakeError> {
    let (mut dialer, mut acceptor) = UnixStream::pair().unwrap();
    let accepting = thread::spawn(move || accept(&mut acceptor, &expect(), &secret()));
    let nonce = [1; 32];
    dialer.write_all(&encode_opening(&hello, &nonce)).unwrap();
    let mut challenge = [0; CHALLENGE_LEN];
    dialer.read_exact(&mut challenge).unwrap();

    let digits = key.to_hex();
    let bytes: Vec<u8> =
        (0..32).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap()).collect();
    let mut mac = Hmac::<Sha256>::new_from_slice(&bytes).unwrap();
    mac.update(b"lockstep dial ");
    mac.update(&hello.encode());
    mac.update(&nonce);
    mac.update(&parse_challenge(&challenge).unwrap());
    let tag = mac.finalize().into_bytes().into();
    dialer.write_all(&encode_proof(&tag)).unwrap();
    // Rejected dialers have been closed already.
    let _ = dialer.write_all(CONFIRMATION);
    accepting.join().unwrap().map(|session| session.hello)
}

#[test]
fn the_key_of_one_generation_is_invalid_for_others() {
    let key = |generation| secret().for_generation(generation);
    // With the right key this dialer is accepted.
    assert_eq!(dial_with_key(hello(), &key(3)).unwrap(), hello());

    let result = dial_with_key(hello(), &key(2));
    assert!(matches!(result, Err(WrongSecret)), "{result:?}");
    let result = dial_with_key(hello(), &secret());
    assert!(matches!(result, Err(WrongSecret)), "{result:?}");
    let old = Hello { generation: 2, ..hello() };
    let result = dial_with_key(old, &key(2));
    assert!(matches!(result, Err(PeerIsOlder { ours: 3, theirs: 2 })), "{result:?}");
}

#[test]
fn any_flipped_bit_of_the_dialer_fails_both_sides() {
    for bit in 0..8 * (OPENING_LEN + PROOF_LEN) {
        let done = run_handshake(
            RecordingStream::pair(Some(bit), None),
            (hello(), secret()),
            (expect(), secret()),
        );
        assert!(done.dialer.is_err() && done.acceptor.is_err(), "bit {bit}");
    }
}

#[test]
fn any_flipped_bit_of_the_acceptor_fails_the_dialer() {
    for bit in 0..8 * (CHALLENGE_LEN + VERDICT_LEN) {
        let done = run_handshake(
            RecordingStream::pair(None, Some(bit)),
            (hello(), secret()),
            (expect(), secret()),
        );
        assert!(done.dialer.is_err() && done.acceptor.is_err(), "bit {bit}");
    }
}

/// On a slow network the dialer may give up while its proof is still on its way.
#[test]
fn a_connection_that_the_dialer_gave_up_is_not_accepted() {
    let written = OPENING_LEN + PROOF_LEN;
    for bit in 8 * written..8 * (written + CONFIRMATION.len()) {
        let pair = RecordingStream::pair(Some(bit), None);
        let done = run_handshake(pair, (hello(), secret()), (expect(), secret()));
        assert!(matches!(done.acceptor, Err(Malformed(_))), "bit {bit}: {:?}", done.acceptor);
    }
    let (dialer, mut acceptor) = UnixStream::pair().unwrap();
    let mut dialer = LosesVerdict(dialer);
    let accepting = thread::spawn(move || accept(&mut acceptor, &expect(), &secret()));
    assert!(dial(&mut dialer, &hello(), &secret()).is_err());
    drop(dialer);
    let accepted = accepting.join().unwrap();
    assert!(matches!(accepted, Err(Closed)), "{accepted:?}");
}

/// A dialer's stream on which the verdict does not arrive in time.
struct LosesVerdict(UnixStream);

impl Read for LosesVerdict {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        match bytes.len() {
            VERDICT_LEN => Err(std::io::ErrorKind::TimedOut.into()),
            _ => self.0.read(bytes),
        }
    }
}

impl Write for LosesVerdict {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn any_flipped_bit_of_a_rejection_is_detected() {
    let newer = Expect { generation: 4, ..expect() };
    for bit in 8 * CHALLENGE_LEN..8 * (CHALLENGE_LEN + VERDICT_LEN) {
        let done = run_handshake(
            RecordingStream::pair(None, Some(bit)),
            (hello(), secret()),
            (newer, secret()),
        );
        let detected = matches!(done.dialer, Err(UnauthenticatedPeer | NotLockstep | Malformed(_)));
        assert!(detected, "bit {bit}: {:?}", done.dialer);
    }
}

#[test]
fn secrets_round_trip_and_are_not_printed() {
    let random = Secret::random().unwrap();
    assert_eq!(Secret::from_hex(&random.to_hex()).unwrap().to_hex(), random.to_hex());
    assert_ne!(Secret::random().unwrap().to_hex(), random.to_hex());
    assert_eq!(format!("{random:?}"), "Secret(..)");

    assert_eq!(Secret::from_hex("42").unwrap_err(), SecretError::Length { found: 2 });
    let spaced = format!("{} {}", "4".repeat(10), "4".repeat(53));
    assert_eq!(Secret::from_hex(&spaced).unwrap_err(), SecretError::NotHex { index: 10 });

    let keys = [
        secret().to_hex(),
        secret().for_generation(0).to_hex(),
        secret().for_generation(1).to_hex(),
        secret().derive(b"").to_hex(),
        secret().derive(b"a").to_hex(),
        other_secret().derive(b"a").to_hex(),
    ];
    for (at, key) in keys.iter().enumerate() {
        assert!(!keys[..at].contains(key), "key {at} repeats an earlier one");
    }
}
