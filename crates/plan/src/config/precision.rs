//! `[precision]`: the numbers in which the model computes.

use super::Reader;
use serde::{Deserialize, Serialize};

/// `[precision]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Precision {
    pub compute: Option<Compute>,
    /// The type in which gradients of parameters are kept and summed.
    pub gradients: Option<Compute>,
}

/// The type of activations and of the weights that are computed with; or that of gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    #[default]
    F32,
    /// Activations and working weights in bf16; the optimizer keeps f32.
    Bf16,
}

impl Compute {
    /// Of a number.
    pub fn bytes(self) -> usize {
        match self {
            Compute::F32 => 4,
            Compute::Bf16 => 2,
        }
    }
}

impl Precision {
    pub(super) fn read(reader: &mut Reader) -> Precision {
        let computes = [("f32", Compute::F32), ("bf16", Compute::Bf16)];
        Precision {
            compute: reader.word("precision.compute", &computes),
            gradients: reader.word("precision.gradients", &computes),
        }
    }
}
