//! Cross-entropy over logits whose columns are split across the tensor ranks. Shards may have different sizes.

use lockstep_comm::Op;
use lockstep_comm::trace::CommAxis;
use lockstep_kernels::{CrossEntropy, Device, Dtype, LogitShard, SoftmaxStats, Tag};

use crate::{Groups, collectives};

impl Groups {
    /// Computes the loss of each row, the same on all ranks, and this rank's columns of the gradient. The first
    /// column belongs to token `first`.
    ///
    /// Two all-reduces: one number per row, then two.
    pub fn cross_entropy(&self, device: &Device, work: CrossEntropy<'_>, first: usize) {
        if self.mesh.tensor == 1 {
            return device.cross_entropy(work);
        }
        let (group, rows) = (self.tensor(), work.logits.rows());
        let mut max = device.empty(1, rows, Dtype::F32, Tag::Buffers);
        device.largest_logits(work.logits.as_view(), max.view_mut());
        self.collective(CommAxis::Tensor, || {
            collectives::all_reduce(device, group, max.view_mut(), Op::Max)
        });

        let mut both = device.empty(2, rows, Dtype::F32, Tag::Buffers);
        let (sum, target) = both.view_mut().split_at(rows);
        let shard = LogitShard { logits: work.logits.as_view(), targets: work.targets, first };
        device.logit_sums(shard, max.view(), sum, target);
        self.collective(CommAxis::Tensor, || {
            collectives::all_reduce(device, group, both.view_mut(), Op::Sum)
        });

        let (sum, target) = (both.view().part(0..rows), both.view().part(rows..2 * rows));
        device.cross_entropy_shard(work, first, SoftmaxStats { max: max.view(), sum, target });
    }
}
