//! What launchers tell each other, as JSON in frames of limited length. Knows no sockets beyond reading and writing.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::events::Share;
use lockstep_comm::wire::frame::{self, CONTROL_LIMIT, FrameHeader, Kind};

/// What a node tells the captain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Said {
    /// It is there, with so many places for ranks.
    Here { name: String, slots: usize },
    /// Its launcher was told to end by this signal; its ranks have been asked to stop.
    Leaving { signal: i32 },
    /// All its ranks of this generation have ended.
    Ended { generation: u32, how: How },
}

/// How a node's ranks ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum How {
    Done,
    /// As asked, with everything saved.
    Stopped,
    /// As asked or ordered, but not all of them had saved.
    Cut,
    Failed {
        local_rank: usize,
        code: i32,
        hopeless: bool,
        text: String,
    },
}

/// What the captain tells a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Told {
    Start(Start),
    Stop,
    End,
    Bye { code: i32, text: String },
}

/// A node's share of a generation, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub generation: u32,
    pub first_rank: usize,
    pub slots: Vec<usize>,
    pub size: usize,
    pub node: usize,
    pub master_port: u16,
}

impl Start {
    /// As the launcher takes it: with where rank 0 is met, and without a socket to meet it on.
    pub fn share(self, master_addr: &str) -> Share {
        let Start { generation, first_rank, slots, size, node, master_port } = self;
        let master_addr = master_addr.to_string();
        Share {
            generation,
            first_rank,
            slots,
            size,
            node,
            master_addr,
            master_port,
            listener: None,
        }
    }
}

/// The bytes of a word; without one, of a sign of life.
pub(crate) fn to_frame(word: Option<&impl Serialize>) -> Vec<u8> {
    let payload = word.map(|word| serde_json::to_vec(word).expect("words are plain data"));
    let kind = if payload.is_some() { Kind::Message } else { Kind::Heartbeat };
    let payload = payload.unwrap_or_default();
    let len = payload.len() as u64;
    let header = FrameHeader { kind, group: 0, sequence: 0, digest: 0, len };
    [header.encode().as_slice(), &payload].concat()
}

/// The next word, or none for a sign of life.
pub(crate) fn receive<W: DeserializeOwned>(from: &mut impl io::Read) -> io::Result<Option<W>> {
    let (header, payload) = frame::read_frame(from, CONTROL_LIMIT).map_err(io::Error::other)?;
    match header.kind {
        Kind::Heartbeat => Ok(None),
        _ => serde_json::from_slice(&payload).map(Some).map_err(io::Error::other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_as_they_went() {
        let text = "it \"printed\"\n  | this".to_string();
        let how = How::Failed { local_rank: 1, code: 137, hopeless: false, text };
        let words = [
            Said::Here { name: "node7".into(), slots: 8 },
            Said::Leaving { signal: 15 },
            Said::Ended { generation: 3, how },
        ];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| to_frame(Some(word))).collect();
        bytes.extend(to_frame(None::<&Said>));
        let mut from = &bytes[..];
        for word in words {
            assert_eq!(receive::<Said>(&mut from).unwrap(), Some(word));
        }
        assert_eq!(receive::<Said>(&mut from).unwrap(), None);
        assert!(receive::<Said>(&mut from).is_err(), "nothing is left");
        // Another program's word is an error, not a panic.
        assert!(receive::<Told>(&mut &to_frame(Some(&"?"))[..]).is_err());
    }
}
