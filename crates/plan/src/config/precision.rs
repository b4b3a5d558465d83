//! `[precision]`: the numbers in which the model dtypes.

use super::Reader;
use lockstep_types::Dtype;

/// `[precision]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Precision {
    pub compute: Option<Dtype>,
    /// The type in which gradients of parameters are kept and summed.
    pub gradients: Option<Dtype>,
}

impl Precision {
    pub(super) fn read(reader: &mut Reader) -> Precision {
        let dtypes = [("f32", Dtype::F32), ("bf16", Dtype::Bf16)];
        Precision {
            compute: reader.word("precision.compute", &dtypes),
            gradients: reader.word("precision.gradients", &dtypes),
        }
    }
}
