//! What a rank calls: the words that ranks compare before they exchange data, and that errors,
//! the flight recorder and tables print. Never carries data.

pub(crate) mod choose;
pub(crate) mod cost;
pub(crate) mod cut;
pub(crate) mod error;
pub(crate) mod fold;

use crate::call::fold::Op;
use lockstep_types::{Collective, Dtype};

/// How a collective is carried out; each has a file under `algo` with its price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Algo {
    /// Reads and writes memory that all members have mapped; one host only.
    Direct = 1,
    Ring,
    /// Double binary tree, in pieces.
    Tree,
    /// Recursive halving and doubling, for any number of members.
    Halving,
    /// Inside the hosts first, then between them.
    TwoLevel,
    /// Every member straight to every other.
    Flat,
    /// The engine's own (MPI): the choice is not ours.
    Engine,
}

impl Algo {
    pub const ALL: [Algo; 7] = [
        Algo::Direct,
        Algo::Ring,
        Algo::Tree,
        Algo::Halving,
        Algo::TwoLevel,
        Algo::Flat,
        Algo::Engine,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Algo::Direct => "direct",
            Algo::Ring => "ring",
            Algo::Tree => "tree",
            Algo::Halving => "halving",
            Algo::TwoLevel => "two_level",
            Algo::Flat => "flat",
            Algo::Engine => "engine",
        }
    }

    /// The algorithms that exist for a collective, whatever the topology.
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
        Algo::ALL.into_iter().find(|a| a.name() == s && *a != Algo::Engine).ok_or_else(|| {
            format!("unknown algorithm {s}; one of direct, ring, tree, halving, two_level, flat")
        })
    }
}

/// One call of one group, as every member must make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub kind: Collective,
    pub algo: Algo,
    pub dtype: Option<Dtype>,
    pub op: Option<Op>,
    pub root: Option<usize>,
    /// Elements, in the sense that is equal on all members; 0 where members differ by right
    /// (`all_to_all_v`).
    pub count: u64,
    /// Which call of the group this is, from 1.
    pub sequence: u64,
    pub group: u64,
}

/// A call in four words, as it lies in shared memory and in message headers.
pub(crate) type CallWords = [u64; 4];

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

    /// The call in these words, or what to say if they are none.
    pub(crate) fn describe(words: CallWords) -> String {
        Call::from_words(words).map_or("something unreadable".into(), |call| call.to_string())
    }

    /// The call in these words, or nothing if they are none.
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
    fn a_call_survives_its_words() {
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
