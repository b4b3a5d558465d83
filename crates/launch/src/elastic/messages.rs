//! Messages between node agents and the coordinator, as JSON in frames of bounded length.

use std::io;

use lockstep_comm::crc32c;
use lockstep_comm::wire::frame::{self, CONTROL_LIMIT, FrameHeader, FrameKind};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::events::{Assignment, Order};

/// Sent by a node agent to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AgentMessage {
    /// The node is available.
    Join(JoinMessage),
    /// The node's launcher received this signal and has asked its ranks to stop.
    Leaving { signal: i32 },
    /// All ranks of the node have exited.
    Finished { generation: u32, result: NodeResult },
}

/// A node that is available.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinMessage {
    /// The host's name.
    pub host: String,
    pub pid: u32,
    /// A random number that identifies the launcher, so that it is recognized when it reconnects.
    pub launcher: String,
    /// Slots for ranks.
    pub slots: usize,
}

impl JoinMessage {
    /// The launcher's process, for messages.
    pub fn process(&self) -> String {
        format!("process {} on host {}", self.pid, self.host)
    }
}

/// How the ranks of one node finished a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NodeResult {
    Success,
    /// Stopped on request, with everything saved.
    Stopped,
    /// Stopped on request or aborted, before all of them had saved.
    Killed,
    Failed {
        local_rank: usize,
        code: i32,
        permanent: bool,
        text: String,
    },
}

/// Sent by the coordinator to a node agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CoordinatorMessage {
    Start(StartMessage),
    Stop,
    Abort,
    Finish {
        code: i32,
        text: String,
    },
    /// Another launcher has this node rank.
    Refuse(String),
}

/// The ranks of one node in one generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartMessage {
    pub generation: u32,
    pub first_rank: usize,
    pub slots: Vec<usize>,
    pub size: usize,
    pub node: usize,
    pub master_port: u16,
}

impl CoordinatorMessage {
    /// The message as an order to a launcher that reaches rank 0 at `master_addr`.
    pub fn into_order(self, master_addr: &str) -> Order {
        match self {
            CoordinatorMessage::Start(start) => Order::Start(start.into_assignment(master_addr)),
            CoordinatorMessage::Stop => Order::Stop,
            CoordinatorMessage::Abort => Order::Abort,
            CoordinatorMessage::Finish { code, text } => Order::Finish { code, text },
            CoordinatorMessage::Refuse(text) => Order::Refused(text),
        }
    }
}

impl StartMessage {
    pub fn into_assignment(self, master_addr: &str) -> Assignment {
        let StartMessage { generation, first_rank, slots, size, node, master_port } = self;
        Assignment {
            generation,
            first_rank,
            slots,
            size,
            node,
            master_addr: master_addr.to_string(),
            master_port,
            listener: None,
        }
    }
}

/// Encodes a message; `None` encodes a heartbeat.
pub(crate) fn encode(message: Option<&impl Serialize>) -> Vec<u8> {
    let payload = message.map(|message| serde_json::to_vec(message).expect("plain data"));
    let kind = if payload.is_some() { FrameKind::Message } else { FrameKind::Heartbeat };
    let payload = payload.unwrap_or_default();
    let len = payload.len() as u64;
    let header = FrameHeader { kind, group: 0, sequence: 0, digest: 0, len };
    [header.encode(crc32c(0, &payload)).as_slice(), &payload].concat()
}

/// Reads the next message; `None` is a heartbeat.
pub(crate) fn receive<M: DeserializeOwned>(from: &mut impl io::Read) -> io::Result<Option<M>> {
    let (header, payload) = frame::read_frame(from, CONTROL_LIMIT).map_err(io::Error::other)?;
    match header.kind {
        FrameKind::Heartbeat => Ok(None),
        _ => serde_json::from_slice(&payload).map(Some).map_err(io::Error::other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let text = "it \"printed\"\n  | this".to_string();
        let result = NodeResult::Failed { local_rank: 1, code: 137, permanent: false, text };
        let messages = [
            AgentMessage::Join(JoinMessage {
                host: "node7".into(),
                pid: 5,
                launcher: "ab".into(),
                slots: 8,
            }),
            AgentMessage::Leaving { signal: 15 },
            AgentMessage::Finished { generation: 3, result },
        ];
        let mut bytes: Vec<u8> =
            messages.iter().flat_map(|message| encode(Some(message))).collect();
        bytes.extend(encode(None::<&AgentMessage>));
        let mut from = &bytes[..];
        for message in messages {
            assert_eq!(receive::<AgentMessage>(&mut from).unwrap(), Some(message));
        }
        assert_eq!(receive::<AgentMessage>(&mut from).unwrap(), None);
        assert!(receive::<AgentMessage>(&mut from).is_err(), "nothing is left");
        // An unknown message is an error, not a panic.
        assert!(receive::<CoordinatorMessage>(&mut &encode(Some(&"?"))[..]).is_err());
    }
}
