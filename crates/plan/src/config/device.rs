//! `[device]`: what the ranks compute on.

use serde::{Deserialize, Serialize};

use super::Reader;

/// `[device]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Device {
    pub kind: Option<DeviceKind>,
    /// Let f32 products of a GPU round their inputs to TF32.
    pub tf32: Option<bool>,
    /// Use the attention of a GPU that gives the same bits in every run. By default for sequences of up to
    /// [`DETERMINISTIC_UP_TO`](crate::DETERMINISTIC_UP_TO) tokens.
    pub deterministic: Option<bool>,
    /// Let a Hopper GPU multiply all experts of a layer in one launch, where that is faster.
    pub grouped_experts: Option<bool>,
    /// Most GiB of the device's memory that tensors may take.
    pub memory_gib: Option<f64>,
}

/// The hardware that a rank computes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A GPU if there is one and its libraries load, otherwise the CPU.
    #[default]
    Auto,
    Cpu,
    /// An NVIDIA GPU, chosen by the rank's number on its host.
    Cuda,
}

impl DeviceKind {
    /// The values as they are typed.
    pub const NAMES: [(&str, DeviceKind); 3] =
        [("auto", DeviceKind::Auto), ("cpu", DeviceKind::Cpu), ("cuda", DeviceKind::Cuda)];
}

impl Device {
    pub(super) fn read(reader: &mut Reader) -> Device {
        Device {
            kind: reader.word("device.kind", &DeviceKind::NAMES),
            tf32: reader.flag("device.tf32"),
            grouped_experts: reader.flag("device.grouped_experts"),
            deterministic: reader.flag("device.deterministic"),
            memory_gib: reader.number("device.memory_gib"),
        }
    }
}
