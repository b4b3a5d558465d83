//! Frames round-trip, and invalid data is rejected.

use std::io::{self, Cursor, Write};

use lockstep_comm::crc32c;
use lockstep_comm::wire::frame::{CONTROL_LIMIT, HEADER_LEN};
use lockstep_comm::wire::*;

fn header(len: u64) -> FrameHeader {
    FrameHeader { kind: FrameKind::Message, group: 1, sequence: 2, digest: 3, len }
}

/// Accepts a few bytes per write, like a socket under load.
struct SlowWriter(Vec<u8>);

impl Write for SlowWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(5);
        self.0.extend(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn frames_of_all_kinds_and_lengths_round_trip() {
    let mut stream = SlowWriter(Vec::new());
    let mut sent = Vec::new();
    for kind in FrameKind::ALL {
        for len in [0, 1, 37, 4096, 65_537] {
            let payload: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let header = FrameHeader { kind, ..header(len) };
            write_frame(&mut stream, &header, &payload).unwrap();
            sent.push((header, payload));
        }
    }
    let mut stream = Cursor::new(stream.0);
    for frame in sent {
        assert_eq!(read_frame(&mut stream, CONTROL_LIMIT).unwrap(), frame);
    }
    assert!(matches!(read_frame(&mut stream, CONTROL_LIMIT), Err(FrameError::Closed)));
}

#[test]
fn a_length_over_the_limit_is_rejected() {
    for (len, limit) in [(CONTROL_LIMIT + 1, CONTROL_LIMIT), (u64::MAX, 0), (u64::MAX, 1 << 40)] {
        let mut stream = Cursor::new(header(len).encode(0));
        match read_frame(&mut stream, limit) {
            Err(FrameError::TooLong { len: l, limit: m }) => assert_eq!((l, m), (len, limit)),
            other => panic!("{other:?}"),
        }
    }
    let payload = vec![0; CONTROL_LIMIT as usize];
    let mut largest = Vec::new();
    write_frame(&mut largest, &header(CONTROL_LIMIT), &payload).unwrap();
    assert_eq!(largest.len(), HEADER_LEN + payload.len());
    read_frame(&mut Cursor::new(largest), CONTROL_LIMIT).unwrap();
}

#[test]
fn invalid_frames_are_rejected() {
    let mut bytes = header(0).encode(0);
    bytes[3] = 77;
    // A peer of another version, whose checksum is right.
    let own = crc32c(0, &bytes[..HEADER_LEN - 4]);
    bytes[HEADER_LEN - 4..].copy_from_slice(&own.to_le_bytes());
    let unknown = FrameHeader::parse(&bytes, 0);
    assert!(matches!(unknown, Err(FrameError::UnknownKind(77))), "{unknown:?}");
    bytes[0] ^= 1;
    let damaged = FrameHeader::parse(&bytes, 0);
    assert!(matches!(damaged, Err(FrameError::BadMagic)), "{damaged:?}");
}

#[test]
fn any_flipped_bit_of_a_frame_is_detected() {
    let mut whole = Vec::new();
    write_frame(&mut whole, &header(100), &[0x5a; 100]).unwrap();
    for bit in 0..8 * whole.len() {
        whole[bit / 8] ^= 1 << (bit % 8);
        // If the length is wrong, nothing is waited for.
        let result = read_frame(&mut Cursor::new(&whole), CONTROL_LIMIT);
        let detected = matches!(result, Err(FrameError::Corrupt { .. } | FrameError::BadMagic));
        assert!(detected, "bit {bit}: {result:?}");
        whole[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn the_end_of_the_stream_inside_a_frame_is_an_error() {
    let mut whole = Vec::new();
    write_frame(&mut whole, &header(4), b"four").unwrap();
    for cut in 1..whole.len() {
        match read_frame(&mut Cursor::new(&whole[..cut]), 4) {
            Err(FrameError::Io(error)) => assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof),
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
}
