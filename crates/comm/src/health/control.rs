//! Messages of the control connection between rank 0 and every other rank, as JSON in frames of limited
//! length.

use crate::call::error::Failure;
use crate::health::board::{ActiveCall, RankState};
use crate::memory::segment::Address;
use crate::wire::crc32c::crc32c;
use crate::wire::frame::{self, CONTROL_LIMIT, FrameHeader, FrameKind, HEADER_LEN};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ControlMessage {
    /// A rank joins.
    Join(Member),
    /// All ranks have joined; the members in rank order.
    Members(Vec<Member>),
    /// The rank is ready; the first rank of each host passes the memory that it created.
    Ready(Option<SharedMemory>),
    /// All ranks are ready; the shared memory by rank.
    Start(Vec<Option<SharedMemory>>),
    /// The rank is alive, with its state and active calls.
    Heartbeat(RankReport),
    /// State and active calls of all ranks, for hosts that cannot see each other's boards.
    Reports(Vec<RankReport>),
    /// The world is broken.
    Abort(Failure),
    /// The rank leaves normally.
    Goodbye,
}

/// State of a rank and the calls that it is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankReport {
    pub state: RankState,
    pub calls: Vec<ActiveCall>,
}

/// Description of a rank, sent when it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Equal for ranks that can share memory.
    pub host: String,
    /// Host name, for messages.
    pub host_name: String,
    pub pid: u32,
    /// Address at which it accepts links, if it does.
    pub listens: Option<SocketAddr>,
}

/// Shared memory of the ranks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedMemory {
    pub board: Address,
    pub arena: Address,
}

impl ControlMessage {
    pub(crate) fn to_frame(&self) -> Vec<u8> {
        let payload = serde_json::to_vec(self).expect("plain data serializes");
        let kind = match self {
            ControlMessage::Heartbeat(_) => FrameKind::Heartbeat,
            ControlMessage::Abort(_) => FrameKind::Abort,
            ControlMessage::Goodbye => FrameKind::Goodbye,
            _ => FrameKind::Message,
        };
        let len = payload.len() as u64;
        let header = FrameHeader { kind, group: 0, sequence: 0, digest: 0, len };
        let mut bytes = header.encode(crc32c(0, &payload)).to_vec();
        bytes.extend(payload);
        bytes
    }

    pub(crate) fn send(&self, to: &mut impl io::Write) -> io::Result<()> {
        to.write_all(&self.to_frame())?;
        to.flush()
    }

    pub(crate) fn receive(from: &mut impl io::Read) -> io::Result<ControlMessage> {
        let (_, payload) = frame::read_frame(from, CONTROL_LIMIT).map_err(io::Error::other)?;
        ControlMessage::from_payload(&payload)
    }

    fn from_payload(payload: &[u8]) -> io::Result<ControlMessage> {
        serde_json::from_slice(payload).map_err(io::Error::other)
    }

    /// The first message in a receive buffer and its length in bytes; `None` if it is incomplete.
    pub(crate) fn take(bytes: &[u8]) -> io::Result<Option<(ControlMessage, usize)>> {
        let Some(first) = bytes.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let (header, checksum) =
            FrameHeader::parse(first, CONTROL_LIMIT).map_err(io::Error::other)?;
        let end = HEADER_LEN + header.len as usize;
        let Some(payload) = bytes.get(HEADER_LEN..end) else { return Ok(None) };
        frame::verify(payload, checksum).map_err(io::Error::other)?;
        Ok(Some((ControlMessage::from_payload(payload)?, end)))
    }
}
