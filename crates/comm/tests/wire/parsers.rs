//! Parsers accept or reject any bytes without panicking, and all values round-trip.

use lockstep_comm::crc32c;
use lockstep_comm::wire::frame::HEADER_LEN;
use lockstep_comm::wire::message::*;
use lockstep_comm::wire::{FrameHeader, FrameKind, Hello, Purpose};
use proptest::collection::vec;
use proptest::prelude::*;

fn purposes() -> impl Strategy<Value = Purpose> {
    prop_oneof![
        Just(Purpose::Control),
        any::<(u64, u32)>().prop_map(|(group, lane)| Purpose::Link { group, lane }),
    ]
}

fn hellos() -> impl Strategy<Value = Hello> {
    (any::<[u32; 4]>(), any::<[u8; 32]>(), purposes()).prop_map(
        |([version, generation, from, to], config, purpose)| Hello {
            version,
            generation,
            config,
            from,
            to,
            purpose,
        },
    )
}

fn verdicts() -> impl Strategy<Value = Verdict> {
    (0..6, any::<u64>()).prop_map(|(code, detail)| {
        let acceptor = detail as u32;
        match code {
            0 => Verdict::Welcome,
            1 => Verdict::Version { acceptor },
            2 => Verdict::OlderGeneration { acceptor },
            3 => Verdict::NewerGeneration { acceptor },
            4 => Verdict::Config { acceptor: detail },
            _ => Verdict::Rank { acceptor },
        }
    })
}

proptest! {
    #[test]
    fn no_parser_panics(bytes in vec(any::<u8>(), 0..200)) {
        let _ = parse_hello(&bytes);
        let _ = parse_opening(&bytes);
        let _ = parse_challenge(&bytes);
        let _ = parse_proof(&bytes);
        let _ = parse_verdict(&bytes);
    }

    /// Corrupted messages reach further into a parser than random bytes.
    #[test]
    fn no_parser_panics_on_corrupted_messages(
        hello in hellos(),
        verdict in verdicts(),
        fixed in any::<[u8; 32]>(),
        (at, to) in any::<(prop::sample::Index, u8)>(),
    ) {
        let corrupted = |mut bytes: Vec<u8>| {
            let at = at.index(bytes.len());
            bytes[at] = to;
            bytes
        };
        // Every value has one encoding, so parsing and encoding must return the same bytes.
        let opening = corrupted(encode_opening(&hello, &fixed).to_vec());
        if let Ok((hello, nonce)) = parse_opening(&opening) {
            prop_assert_eq!(encode_opening(&hello, &nonce).to_vec(), opening);
        }
        let answer = corrupted(encode_verdict(&verdict, &fixed).to_vec());
        if let Ok((verdict, tag)) = parse_verdict(&answer) {
            prop_assert_eq!(encode_verdict(&verdict, &tag).to_vec(), answer);
        }
    }

    #[test]
    fn messages_round_trip(hello in hellos(), verdict in verdicts(), fixed in any::<[u8; 32]>()) {
        prop_assert_eq!(parse_hello(&hello.encode()).unwrap(), hello);
        prop_assert_eq!(parse_opening(&encode_opening(&hello, &fixed)).unwrap(), (hello, fixed));
        prop_assert_eq!(parse_challenge(&encode_challenge(&fixed)).unwrap(), fixed);
        prop_assert_eq!(parse_proof(&encode_proof(&fixed)).unwrap(), fixed);
        prop_assert_eq!(parse_verdict(&encode_verdict(&verdict, &fixed)).unwrap(), (verdict, fixed));
    }

    #[test]
    fn headers_round_trip(
        kind in 0..FrameKind::ALL.len(),
        [group, sequence, digest, len] in any::<[u64; 4]>(),
    ) {
        let header = FrameHeader { kind: FrameKind::ALL[kind], group, sequence, digest, len };
        prop_assert_eq!(FrameHeader::parse(&header.encode(7), len).unwrap(), (header, 7));
        if let Some(less) = len.checked_sub(1) {
            prop_assert!(FrameHeader::parse(&header.encode(7), less).is_err());
        }
    }

    #[test]
    fn any_header_is_accepted_or_rejected(bytes in vec(any::<u8>(), HEADER_LEN), limit in any::<u64>(), kind in 0u8..8) {
        let mut bytes: [u8; HEADER_LEN] = bytes.try_into().unwrap();
        let _ = FrameHeader::parse(&bytes, limit);
        bytes[..4].copy_from_slice(&[b'L', b'S', b'f', kind]);
        let own = crc32c(0, &bytes[..HEADER_LEN - 4]);
        bytes[HEADER_LEN - 4..].copy_from_slice(&own.to_le_bytes());
        if let Ok((header, checksum)) = FrameHeader::parse(&bytes, limit) {
            prop_assert!(header.len <= limit);
            prop_assert_eq!(header.encode(checksum), bytes);
        }
    }
}
