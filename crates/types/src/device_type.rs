//! Kinds of hardware that ranks compute on.

use serde::{Deserialize, Serialize};

/// The hardware of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceType {
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}
