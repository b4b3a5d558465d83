//! The tensor axis at the ends of a model: cross-entropy over logits whose columns are dealt out among ranks.
//! Shares need not be equal.

use lockstep_comm::Op;
use lockstep_kernels::{CrossEntropy, Device, Dtype, Found, Tag};
use lockstep_plan::GroupKind;

use crate::Groups;

impl Groups {
    /// The loss of each row, the same on all ranks, and this rank's columns of the gradient. The first column
    /// is of token `first`.
    ///
    /// Two all-reduces: one number per row, then two.
    pub fn cross_entropy(&self, device: &Device, work: CrossEntropy<'_>, first: usize) {
        if self.mesh.tensor == 1 {
            return device.cross_entropy(work);
        }
        let group = self.group(GroupKind::Tensor);
        let rows = work.logits.rows();
        let mut max = device.empty(1, rows, Dtype::F32, Tag::Buffers);
        device.largest_logits(work.logits.as_view(), max.view_mut());
        self.note(self.exchanged(|| group.all_reduce(max.view_mut().host::<f32>(), Op::Max)));

        let mut both = device.empty(2, rows, Dtype::F32, Tag::Buffers);
        let (sum, target) = both.view_mut().split_at(rows);
        device.logit_sums(work.logits.as_view(), work.targets, first, max.view(), sum, target);
        self.note(self.exchanged(|| group.all_reduce(both.view_mut().host::<f32>(), Op::Sum)));

        let (sum, target) = (both.view().part(0..rows), both.view().part(rows..2 * rows));
        device.cross_entropy_share(work, first, Found { max: max.view(), sum, target });
    }
}
