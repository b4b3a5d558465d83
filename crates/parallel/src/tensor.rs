//! The tensor axis. Between `gather_sequence` and `reduce_output` a rank works on its columns or rows of the matrices
//! and on all tokens; outside, all ranks hold the same residual stream, or, with sequence parallelism, each rank holds
//! its own tokens of it (Megatron-LM; Korthikanti et al.).
//!
//! ```text
//!          stream ── gather_sequence ──▶ column-parallel ── row-parallel ──▶ reduce_output ── stream
//! tensor   replicated      –                                                 all-reduce
//! sequence own tokens      all-gather                                        reduce-scatter
//! backward: from right to left; all-gather and reduce-scatter change places.
//! ```
//!
//! `rows.rs` overlaps these collectives with the matrix multiplies.

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Group, Op};
use lockstep_kernels::{Device, Tag, Tensor};
use lockstep_plan::{GroupKind, cut};
use std::ops::Range;

use crate::{Groups, collectives};

impl Groups {
    /// The tokens of the residual stream that this rank holds, out of `tokens`.
    pub fn stream_rows(&self, tokens: usize) -> Range<usize> {
        if self.sequence { cut(tokens, self.mesh.tensor, self.coord.tensor) } else { 0..tokens }
    }

    /// Gathers the rows of all tokens from the tensor ranks.
    ///
    /// Sequence parallel: one all-gather, (P-1)/P of all rows per rank. Otherwise the identity.
    pub fn gather_sequence(&self, device: &Device, x: Tensor) -> Tensor {
        if !self.sequence {
            return x;
        }
        let mut all = device.empty(x.rows() * self.mesh.tensor, x.cols(), x.dtype(), Tag::Buffers);
        self.collective(CommAxis::Tensor, || {
            collectives::all_gather(device, self.tensor(), x.view(), all.view_mut())
        });
        all
    }

    /// Backward of `gather_sequence`: sums the gradients of all tokens over the tensor ranks; returns the rows of this
    /// rank's tokens.
    ///
    /// One reduce-scatter or all-reduce of all rows.
    pub fn gather_sequence_backward(&self, device: &Device, dx: Tensor) -> Tensor {
        self.reduce_partial(device, dx, Tag::Buffers)
    }

    /// Sums the partial outputs of all tokens over the tensor ranks; returns the rows of this rank's tokens.
    ///
    /// One reduce-scatter or all-reduce of all rows.
    pub fn reduce_output(&self, device: &Device, y: Tensor) -> Tensor {
        self.reduce_partial(device, y, Tag::Activations)
    }

    /// Backward of `reduce_output`: the gradient of all tokens.
    pub fn reduce_output_backward(&self, device: &Device, dy: Tensor) -> Tensor {
        self.gather_sequence(device, dy)
    }

    /// Sums a tensor over a group, in place.
    pub fn all_reduce(&self, device: &Device, kind: GroupKind, x: &mut Tensor) {
        let group = self.group(kind);
        if group.size() > 1 {
            self.collective(CommAxis::Tensor, || {
                collectives::all_reduce(device, group, x.view_mut(), Op::Sum)
            });
        }
    }

    /// Whether this rank contributes terms that must be added once per tensor group: biases, residuals, positions.
    pub fn is_tensor_root(&self) -> bool {
        self.coord.tensor == 0
    }

    pub(crate) fn reduce_partial(&self, device: &Device, mut x: Tensor, tag: Tag) -> Tensor {
        if !self.sequence {
            self.all_reduce(device, GroupKind::Tensor, &mut x);
            return x;
        }
        let mut own = device.empty(x.rows() / self.mesh.tensor, x.cols(), x.dtype(), tag);
        let group = self.tensor();
        self.collective(CommAxis::Tensor, || {
            collectives::reduce_scatter(device, group, x.view(), own.view_mut())
        });
        own
    }

    pub(crate) fn tensor(&self) -> &Group {
        self.group(GroupKind::Tensor)
    }
}
