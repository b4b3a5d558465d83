//! Cross-entropy over logits whose columns are split across the tensor ranks. Shards may have different sizes.

use lockstep_comm::Op;
use lockstep_kernels::{CrossEntropy, Device, Dtype, Found, Tag};

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
        let rows = work.logits.rows();
        let mut max = device.empty(1, rows, Dtype::F32, Tag::Buffers);
        device.largest_logits(work.logits.as_view(), max.view_mut());
        self.collective(|| collectives::all_reduce(self.tensor(), max.view_mut(), Op::Max));

        let mut both = device.empty(2, rows, Dtype::F32, Tag::Buffers);
        let (sum, target) = both.view_mut().split_at(rows);
        device.logit_sums(work.logits.as_view(), work.targets, first, max.view(), sum, target);
        self.collective(|| collectives::all_reduce(self.tensor(), both.view_mut(), Op::Sum));

        let (sum, target) = (both.view().part(0..rows), both.view().part(rows..2 * rows));
        device.cross_entropy_share(work, first, Found { max: max.view(), sum, target });
    }
}
