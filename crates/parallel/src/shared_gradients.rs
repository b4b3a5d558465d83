//! Gradients of parameters that several ranks of another axis hold: each rank has a part of the sum, and an all-reduce
//! at the end of the passes completes it.

use std::ops::Range;

use lockstep_comm::{Op, Result};
use lockstep_kernels::{Device, Tag};
use lockstep_plan::model::Part;
use lockstep_plan::reduction::SharedSum;

use crate::{Gradients, Groups, collectives};

/// A sum over another axis, and the gradients that take part.
pub(crate) struct SharedGradients {
    pub sum: SharedSum,
    /// Block, unit, and the range within this rank's shard of the unit.
    runs: Vec<(usize, usize, Range<usize>)>,
}

impl SharedGradients {
    pub fn new(sum: SharedSum, part: &Part, sequence: bool) -> SharedGradients {
        SharedGradients { sum, runs: sum.runs(part, sequence) }
    }

    /// All-reduces the gradients in one call.
    pub fn all_reduce(
        &self,
        device: &Device,
        groups: &Groups,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let group = groups.group(self.sum.group());
        // Compression gave each rank a different gradient of the same parameters; the first rank's is taken.
        let adds = self.sum != SharedSum::Compressed || group.rank() == 0;
        let len = self.runs.iter().map(|(_, _, run)| run.len()).sum();
        let mut all = device.zeros(1, len, gradients.dtype, Tag::Buffers);
        let mut at = 0;
        for (block, unit, run) in &self.runs {
            let to = all.view_mut().part(at..at + run.len());
            if let Some(own) = gradients.own(*block, *unit).filter(|_| adds) {
                device.copy(own.part(run.clone()), to);
            }
            at += run.len();
        }
        collectives::all_reduce(device, group, all.view_mut(), Op::Sum)?;
        let mut at = 0;
        for (block, unit, run) in &self.runs {
            if let Some(own) = gradients.own_mut(*block, *unit) {
                device.copy(all.view().part(at..at + run.len()), own.part(run.clone()));
            }
            at += run.len();
        }
        Ok(())
    }
}
