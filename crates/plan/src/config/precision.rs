//! `[precision]`: number formats.

use serde::{Deserialize, Serialize};

use super::Reader;
use lockstep_types::Dtype;

/// `[precision]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Precision {
    pub compute: Option<Dtype>,
    /// Type in which parameter gradients are stored and summed.
    pub gradients: Option<Dtype>,
    /// Matrices that are multiplied in fp8.
    pub fp8: Option<Fp8>,
    /// Where the scales of fp8 matrices come from.
    pub fp8_scaling: Option<Fp8Scaling>,
}

/// Matrices that are multiplied in fp8: activations and weights in e4m3, gradients in e5m2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Fp8 {
    #[default]
    #[serde(rename = "off")]
    Off,
    /// Linear layers of attention and of dense feed-forwards. Experts and routers stay in the compute type.
    #[serde(rename = "layers")]
    Layers,
    /// Also the output projection.
    #[serde(rename = "layers+head")]
    LayersAndHead,
}

/// Where the scale of an fp8 matrix comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fp8Scaling {
    /// The largest element of the matrix itself, which is read twice.
    #[default]
    Current,
    /// The largest element in earlier steps.
    Delayed,
}

impl Fp8 {
    /// The values as they are typed.
    pub const NAMES: [(&str, Fp8); 3] =
        [("off", Fp8::Off), ("layers", Fp8::Layers), ("layers+head", Fp8::LayersAndHead)];

    pub fn name(self) -> &'static str {
        let found = Fp8::NAMES.iter().find(|(_, value)| *value == self);
        found.expect("every value has a name").0
    }

    pub fn is_on(self) -> bool {
        self != Fp8::Off
    }
}

impl Fp8Scaling {
    /// The values as they are typed.
    pub const NAMES: [(&str, Fp8Scaling); 2] =
        [("current", Fp8Scaling::Current), ("delayed", Fp8Scaling::Delayed)];
}

impl Precision {
    pub(super) fn read(reader: &mut Reader) -> Precision {
        let dtypes = [("f32", Dtype::F32), ("bf16", Dtype::Bf16)];
        Precision {
            compute: reader.word("precision.compute", &dtypes),
            gradients: reader.word("precision.gradients", &dtypes),
            fp8: reader.word("precision.fp8", &Fp8::NAMES),
            fp8_scaling: reader.word("precision.fp8_scaling", &Fp8Scaling::NAMES),
        }
    }
}
