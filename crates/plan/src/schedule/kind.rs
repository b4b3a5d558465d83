//! Which schedule, by the word that a run file has for it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Kind {
    /// All forward, then all backward (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    Gpipe,
    /// Backward as soon as possible (PipeDream-Flush, Narayanan et al. 2021).
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with several stages per rank (Megatron-LM, Narayanan et al. 2021).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Weight gradients fill the gaps, in the memory of 1F1B (Qi et al. 2023).
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// Weight gradients fill all gaps, in twice the memory (Qi et al. 2023).
    #[serde(rename = "zb-h2")]
    ZbH2,
}

impl Kind {
    pub const ALL: [Kind; 5] =
        [Kind::Gpipe, Kind::OneForwardOneBackward, Kind::Interleaved, Kind::ZbH1, Kind::ZbH2];

    /// The word in run files.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gpipe => "gpipe",
            Kind::OneForwardOneBackward => "1f1b",
            Kind::Interleaved => "interleaved",
            Kind::ZbH1 => "zb-h1",
            Kind::ZbH2 => "zb-h2",
        }
    }

    /// Whether the gradients of inputs and of weights are two actions.
    pub fn splits(self) -> bool {
        matches!(self, Kind::ZbH1 | Kind::ZbH2)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(word: &str) -> Result<Kind, String> {
        Kind::ALL.into_iter().find(|kind| kind.name() == word).ok_or_else(|| {
            let names = Kind::ALL.map(Kind::name).join(", ");
            format!("no schedule is called `{word}`; there are {names}")
        })
    }
}
