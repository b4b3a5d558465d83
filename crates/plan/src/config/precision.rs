//! `[precision]`: number formats.

use super::Reader;
use lockstep_types::Dtype;

/// `[precision]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Precision {
    pub compute: Option<Dtype>,
    /// Type in which parameter gradients are stored and summed.
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
