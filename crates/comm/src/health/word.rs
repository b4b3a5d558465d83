//! What ranks tell rank 0 and rank 0 tells them, beside the data: the words of the control
//! connection, as JSON in frames of limited length.

use crate::call::error::Failure;
use crate::health::board::{Doing, State};
use crate::memory::segment::Address;
use crate::wire::frame::{self, CONTROL_LIMIT, FrameHeader, HEADER_LEN, Kind};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// A rank is there.
    Join(Member),
    /// Everybody is there: all ranks in order.
    Roll(Vec<Member>),
    /// The memory that the first rank of each host has made.
    Ready(Option<Shares>),
    Go(Vec<Option<Shares>>),
    /// A sign of life, and what the rank is doing.
    Beat {
        state: State,
        doing: Vec<Doing>,
    },
    /// What all ranks are doing, for hosts that cannot see each other's boards.
    Table(Vec<(State, Vec<Doing>)>),
    /// The world is broken.
    Abort(Failure),
    /// The rank leaves in good order.
    Goodbye,
}

/// What a rank says of itself when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Equal for ranks that can share memory.
    pub host: String,
    /// The host as people call it.
    pub host_name: String,
    pub pid: u32,
    /// Where it takes links, if it does.
    pub listens: Option<SocketAddr>,
}

/// The memory that the ranks of a host share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shares {
    pub board: Address,
    pub arena: Address,
}

impl Word {
    pub(crate) fn to_frame(&self) -> Vec<u8> {
        let payload = serde_json::to_vec(self).expect("words are plain data");
        let kind = match self {
            Word::Beat { .. } => Kind::Heartbeat,
            Word::Abort(_) => Kind::Abort,
            Word::Goodbye => Kind::Goodbye,
            _ => Kind::Message,
        };
        let len = payload.len() as u64;
        let header = FrameHeader { kind, group: 0, sequence: 0, digest: 0, len };
        let mut bytes = header.encode().to_vec();
        bytes.extend(payload);
        bytes
    }

    pub(crate) fn send(&self, to: &mut impl io::Write) -> io::Result<()> {
        to.write_all(&self.to_frame())
    }

    pub(crate) fn receive(from: &mut impl io::Read) -> io::Result<Word> {
        let (_, payload) = frame::read_frame(from, CONTROL_LIMIT).map_err(io::Error::other)?;
        Word::from_payload(&payload)
    }

    fn from_payload(payload: &[u8]) -> io::Result<Word> {
        serde_json::from_slice(payload).map_err(io::Error::other)
    }

    /// The first word in bytes that came in, and how many bytes it took; nothing if it is not whole.
    pub(crate) fn take(bytes: &[u8]) -> io::Result<Option<(Word, usize)>> {
        let Some(header) = bytes.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let header = FrameHeader::parse(header, CONTROL_LIMIT).map_err(io::Error::other)?;
        let end = HEADER_LEN + header.len as usize;
        match bytes.get(HEADER_LEN..end) {
            Some(payload) => Ok(Some((Word::from_payload(payload)?, end))),
            None => Ok(None),
        }
    }
}
