//! Description of a call: compared between ranks before data moves, and printed by errors, the flight
//! recorder and tables. Holds no data.

pub(crate) mod error;
pub(crate) mod fold;
pub(crate) mod history;
pub(crate) mod partition;
pub(crate) mod topology;
pub(crate) mod traffic;

use crate::call::fold::Op;
use lockstep_types::{Collective, Dtype};

/// Algorithm of a collective; each has a file under `algo` with its cost formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Algo {
    /// Through memory that all members have mapped; one host only.
    Direct = 1,
    Ring,
    /// Double binary tree, pipelined in pieces.
    Tree,
    /// Recursive halving and doubling, for any number of members.
    Halving,
    /// Within hosts first, then between them.
    TwoLevel,
    /// Every member directly to every other.
    Flat,
    /// Chosen by an external engine (MPI).
    Engine,
    /// Kernels on memory of a GPU that all members use.
    Shared,
    /// NCCL, on device memory.
    Nccl,
}

impl Algo {
    pub const ALL: [Algo; 9] = [
        Algo::Direct,
        Algo::Ring,
        Algo::Tree,
        Algo::Halving,
        Algo::TwoLevel,
        Algo::Flat,
        Algo::Engine,
        Algo::Shared,
        Algo::Nccl,
    ];

    /// Whether the algorithm is not one of ours that a user may name.
    fn is_internal(self) -> bool {
        matches!(self, Algo::Engine | Algo::Shared | Algo::Nccl)
    }

    pub fn name(self) -> &'static str {
        match self {
            Algo::Direct => "direct",
            Algo::Ring => "ring",
            Algo::Tree => "tree",
            Algo::Halving => "halving",
            Algo::TwoLevel => "two_level",
            Algo::Flat => "flat",
            Algo::Engine => "engine",
            Algo::Shared => "shared",
            Algo::Nccl => "nccl",
        }
    }

    /// All algorithms of a collective, on any topology.
    pub fn of(kind: Collective) -> &'static [Algo] {
        use Algo::*;
        match kind {
            Collective::AllReduce => &[Direct, Ring, Tree, Halving, TwoLevel],
            Collective::Reduce => &[Direct, Ring, Tree, TwoLevel],
            Collective::ReduceScatter => &[Direct, Ring, Halving, TwoLevel],
            Collective::AllGather => &[Direct, Ring, Halving, TwoLevel],
            Collective::Broadcast => &[Direct, Ring, Tree, TwoLevel],
            Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::AllToAllV => &[Direct, Flat],
            Collective::Barrier => &[Direct, Halving, TwoLevel],
            Collective::SendRecv => &[Flat],
        }
    }
}

impl std::str::FromStr for Algo {
    type Err = String;

    fn from_str(s: &str) -> Result<Algo, String> {
        Algo::ALL.into_iter().find(|a| a.name() == s && !a.is_internal()).ok_or_else(|| {
            format!("unknown algorithm {s}; use direct, ring, tree, halving, two_level or flat")
        })
    }
}

/// One call of one group; equal on all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub kind: Collective,
    pub algo: Algo,
    pub dtype: Option<Dtype>,
    pub op: Option<Op>,
    pub root: Option<usize>,
    /// Number of elements, counted so that it is equal on all members; 0 for `all_to_all_v`, whose
    /// members may pass different counts.
    pub count: u64,
    /// Number of the call in its group, from 1.
    pub sequence: u64,
    pub group: u64,
}

/// A call encoded in four words, for shared memory and message headers.
pub(crate) type CallWords = [u64; 4];

/// The words that members of a group compare before data moves: the call without its group, which the
/// link or shared memory implies, and the history of earlier calls (see `history`).
pub(crate) type Stamp = [u64; 6];

impl Call {
    pub fn bytes(&self) -> u64 {
        self.count * self.dtype.map_or(0, |d| d.bytes() as u64)
    }

    pub(crate) fn words(&self) -> CallWords {
        let root = self.root.map_or(0, |r| r as u64 + 1);
        let head = self.kind as u64
            | (self.algo as u64) << 8
            | self.dtype.map_or(0, |d| d as u64) << 16
            | self.op.map_or(0, |o| o as u64) << 24
            | root << 32;
        [head, self.count, self.sequence, self.group]
    }

    /// Text of an encoded call, for error messages.
    pub(crate) fn describe(words: CallWords) -> String {
        Call::from_words(words).map_or("an unreadable call".into(), |call| call.to_string())
    }

    /// Decodes a call; `None` if the words do not encode one.
    pub(crate) fn from_words(words: CallWords) -> Option<Call> {
        let byte = |i: u32| (words[0] >> (8 * i)) as u8;
        Some(Call {
            kind: Collective::ALL.into_iter().find(|k| *k as u8 == byte(0))?,
            algo: Algo::ALL.into_iter().find(|a| *a as u8 == byte(1))?,
            dtype: Dtype::from_code(byte(2)),
            op: Op::from_code(byte(3)),
            root: ((words[0] >> 32) as usize).checked_sub(1),
            count: words[1],
            sequence: words[2],
            group: words[3],
        })
    }
}

/// `all_reduce #1041 (f32 × 1048576 = 4 MiB, sum, ring)`
impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} #{} (", self.kind.name(), self.sequence)?;
        if let Some(dtype) = self.dtype {
            write!(f, "{} × {} = {}, ", dtype.name(), self.count, human_bytes(self.bytes()))?;
        }
        if let Some(op) = self.op {
            write!(f, "{}, ", op.name())?;
        }
        if let Some(root) = self.root {
            write!(f, "root {root}, ")?;
        }
        write!(f, "{})", self.algo.name())
    }
}

/// `4 MiB`, `1.5 KiB`, `12 B`.
pub fn human_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value.fract() == 0.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_round_trip_through_words() {
        let call = Call {
            kind: Collective::Broadcast,
            algo: Algo::Tree,
            dtype: Some(Dtype::Bf16),
            op: None,
            root: Some(3),
            count: 7,
            sequence: 12,
            group: 99,
        };
        assert_eq!(Call::from_words(call.words()), Some(call));
        assert_eq!(Call::from_words([0; 4]), None);
        assert_eq!(call.to_string(), "broadcast #12 (bf16 × 7 = 14 B, root 3, tree)");
    }
}
