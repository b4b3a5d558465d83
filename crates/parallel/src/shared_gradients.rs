//! Gradients of parameters that several ranks of another axis hold: each has a part of the sum, and an all-reduce at
//! the end of the passes completes it.

use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Tag};
use lockstep_plan::GroupKind;
use lockstep_plan::model::{BlockParams, Param, Split};

use crate::{Gradients, Groups, floats};

/// Sums what ranks of the tensor axis and the two ends of the pipeline each have a part of. `compressed` gradients may
/// differ between tensor ranks that hold the same parameters; the first rank's count.
pub(crate) fn sum_over_other_axes(
    device: &Device,
    groups: &Groups,
    layout: &[BlockParams],
    gradients: &mut Gradients,
    compressed: bool,
) {
    let tensor = groups.group(GroupKind::Tensor);
    let mut sum = |group: &Group, adds: bool, which: &dyn Fn(&Param) -> bool| {
        groups.note(all_reduce_params(device, group, layout, gradients, adds, which));
    };
    if tensor.size() > 1 && compressed {
        sum(tensor, tensor.rank() == 0, &|param| param.same_on_tensor(groups.sequence));
    }
    if groups.sequence {
        sum(tensor, true, &|param| param.split == Split::Norm);
    }
    if groups.mesh.keys > 1 {
        sum(groups.group(GroupKind::Keys), true, &|param| param.split == Split::Keys);
    }
    let ends = groups.group(GroupKind::Ends);
    if ends.size() > 1 {
        sum(ends, true, &|param| param.tied);
    }
}

/// All-reduces the gradients of the selected parameters in one call. A rank that does not `add` contributes zeros.
fn all_reduce_params(
    device: &Device,
    group: &Group,
    layout: &[BlockParams],
    gradients: &mut Gradients,
    adds: bool,
    which: &dyn Fn(&Param) -> bool,
) -> Result<()> {
    // Block, unit, and the run within this rank's shard of it.
    let mut runs = Vec::new();
    for (block, params) in layout.iter().enumerate() {
        for (unit, piece) in gradients.shards[block].iter().enumerate() {
            for (start, param) in params.placed().filter(|(_, param)| which(param)) {
                if let Some(run) = piece.within(start..start + param.len()) {
                    runs.push((block, unit, run));
                }
            }
        }
    }
    let len = runs.iter().map(|(_, _, run)| run.len()).sum();
    let mut all = device.zeros(1, len, gradients.dtype, Tag::Buffers);
    let mut at = 0;
    for (block, unit, run) in &runs {
        let to = all.view_mut().part(at..at + run.len());
        if let Some(own) = gradients.own(*block, *unit).filter(|_| adds) {
            device.copy(own.part(run.clone()), to);
        }
        at += run.len();
    }
    floats::all_reduce(group, all.view_mut())?;
    let mut at = 0;
    for (block, unit, run) in runs {
        if let Some(own) = gradients.own_mut(block, unit) {
            device.copy(all.view().part(at..at + run.len()), own.part(run.clone()));
        }
        at += run.len();
    }
    Ok(())
}
