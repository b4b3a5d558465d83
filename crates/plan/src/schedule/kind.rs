//! Kinds of schedules and their names in run files.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum ScheduleKind {
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

impl ScheduleKind {
    pub const ALL: [ScheduleKind; 5] = [
        ScheduleKind::Gpipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbH2,
    ];

    /// Name in run files.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::Gpipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZbH1 => "zb-h1",
            ScheduleKind::ZbH2 => "zb-h2",
        }
    }

    /// Whether the gradients of inputs and of weights are two actions.
    pub fn splits(self) -> bool {
        matches!(self, ScheduleKind::ZbH1 | ScheduleKind::ZbH2)
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = String;

    fn from_str(word: &str) -> Result<ScheduleKind, String> {
        ScheduleKind::ALL.into_iter().find(|kind| kind.name() == word).ok_or_else(|| {
            let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
            format!("unknown schedule `{word}`; use one of {names}")
        })
    }
}
