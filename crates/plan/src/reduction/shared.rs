//! Gradients of parameters that several ranks of another axis hold. They are all-reduced at the end of the passes, all
//! of a kind in one call.

use std::ops::Range;

use crate::config::Compression;
use crate::mesh::GroupKind;
use crate::model::{Param, Part, Split};

/// A sum over ranks of the tensor axis or over the ends of the pipeline.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedSum {
    /// Parameters that all tensor ranks hold, after compression has given each of them a different gradient: the first
    /// rank's is taken. Only in steps whose gradients are compressed.
    Compressed,
    /// Norms, of which each tensor rank has seen its own tokens (sequence parallelism).
    Norms,
    /// Key and value heads that several tensor ranks hold.
    Keys,
    /// A token table that the first and the last stage hold.
    TiedTable,
}

impl SharedSum {
    pub fn group(self) -> GroupKind {
        match self {
            SharedSum::Compressed | SharedSum::Norms => GroupKind::Tensor,
            SharedSum::Keys => GroupKind::Keys,
            SharedSum::TiedTable => GroupKind::Ends,
        }
    }

    fn selects(self, param: &Param, sequence: bool) -> bool {
        match self {
            SharedSum::Compressed => param.same_on_tensor(sequence),
            SharedSum::Norms => param.split == Split::Norm,
            SharedSum::Keys => param.split == Split::Keys,
            SharedSum::TiedTable => param.tied,
        }
    }

    /// The gradients that take part: block, unit, and the range within this rank's shard of the unit.
    pub fn runs(self, part: &Part, sequence: bool) -> Vec<(usize, usize, Range<usize>)> {
        let mut runs = Vec::new();
        for (block, params) in part.blocks.iter().enumerate() {
            for (unit, shard) in part.shards[block].iter().enumerate() {
                let selected = params.placed().filter(|(_, param)| self.selects(param, sequence));
                let ranges = selected.map(|(start, param)| start..start + param.len());
                runs.extend(ranges.filter_map(|range| Some((block, unit, shard.within(range)?))));
            }
        }
        runs
    }

    /// Elements that take part.
    pub fn len(self, part: &Part, sequence: bool) -> usize {
        self.runs(part, sequence).iter().map(|(_, _, run)| run.len()).sum()
    }
}

/// The sums that a rank takes part in, in order.
pub(super) fn sums(part: &Part, sequence: bool, compression: Compression) -> Vec<SharedSum> {
    let mesh = &part.mesh;
    let applies = |sum: &SharedSum| match sum {
        SharedSum::Compressed => {
            mesh.tensor > 1 && mesh.replicas() > 1 && compression.depends_on_neighbours()
        }
        SharedSum::Norms => mesh.tensor > 1 && sequence,
        SharedSum::Keys => mesh.keys > 1,
        SharedSum::TiedTable => mesh.pipe > 1,
    };
    let all = [SharedSum::Compressed, SharedSum::Norms, SharedSum::Keys, SharedSum::TiedTable];
    all.into_iter().filter(applies).filter(|sum| sum.len(part, sequence) > 0).collect()
}
