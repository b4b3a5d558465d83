//! The operations of a process group.

use serde::{Deserialize, Serialize};

/// A collective, or a point-to-point message.
///
/// The discriminants are part of the wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Collective {
    AllReduce = 1,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Gather,
    Scatter,
    /// All-to-all with equal parts.
    AllToAll,
    /// All-to-all with parts whose sizes depend on the data.
    AllToAllV,
    Barrier,
    /// A send and the matching receive.
    SendRecv,
}

impl Collective {
    pub const ALL: [Collective; 11] = [
        Collective::AllReduce,
        Collective::Reduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::AllToAllV,
        Collective::Barrier,
        Collective::SendRecv,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::Reduce => "reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Broadcast => "broadcast",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::AllToAllV => "all_to_all_v",
            Collective::Barrier => "barrier",
            Collective::SendRecv => "send/recv",
        }
    }
}
