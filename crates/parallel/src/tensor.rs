//! The tensor axis: between `enter` and `leave` a rank works on its columns or rows of the matrices and on
//! all tokens; outside, all ranks hold the same residual stream, or, under sequence parallelism, each its own
//! run of its tokens (Megatron-LM; Korthikanti et al.).
//!
//! ```text
//!          stream ── enter ──▶ column-cut ── row-cut ──▶ leave ── stream
//! plain    same       –                                  all-reduce
//! sequence own rows   all-gather                         reduce-scatter
//! backward: the same from right to left, each with its counterpart.
//! ```
//!
//! `rows.rs` does the same where the wire does the work, while the matrices are multiplied.

use lockstep_comm::Group;
use lockstep_kernels::{Device, Tag, Tensor};
use lockstep_plan::{GroupKind, cut};
use std::ops::Range;

use crate::{Groups, floats};

impl Groups {
    /// The tokens of the stream, of `tokens`, that this rank holds.
    pub fn stream_rows(&self, tokens: usize) -> Range<usize> {
        if self.sequence { cut(tokens, self.mesh.tensor, self.coord.tensor) } else { 0..tokens }
    }

    /// From this rank's rows of the stream to all tokens.
    ///
    /// Sequence parallel: one all-gather, (P-1)/P of all rows per rank. Otherwise nothing.
    pub fn enter(&self, device: &Device, x: Tensor) -> Tensor {
        if !self.sequence {
            return x;
        }
        let mut all = device.empty(x.rows() * self.mesh.tensor, x.cols(), x.dtype(), Tag::Buffers);
        self.note(self.exchanged(|| floats::all_gather(self.tensor(), x.view(), all.view_mut())));
        all
    }

    /// The gradient on its way back: ranks' parts of it, for all tokens, become the whole, for the stream's
    /// rows of this rank.
    ///
    /// One reduce-scatter or all-reduce of all rows.
    pub fn enter_backward(&self, device: &Device, dx: Tensor) -> Tensor {
        self.summed(device, dx, Tag::Buffers)
    }

    /// Ranks' parts of a sum, for all tokens, become the whole, for the stream's rows of this rank.
    ///
    /// One reduce-scatter or all-reduce of all rows.
    pub fn leave(&self, device: &Device, y: Tensor) -> Tensor {
        self.summed(device, y, Tag::Activations)
    }

    /// The gradient on its way back, of all tokens.
    pub fn leave_backward(&self, device: &Device, dy: Tensor) -> Tensor {
        self.enter(device, dy)
    }

    /// Sums small numbers that every rank has a part of, in place.
    pub fn sum_over_tensor(&self, x: &mut Tensor) {
        if self.mesh.tensor > 1 {
            self.note(self.exchanged(|| floats::all_reduce(self.tensor(), x.view_mut())));
        }
    }

    /// Whether this rank adds what must be added once: biases, residuals, positions.
    pub fn adds(&self) -> bool {
        self.coord.tensor == 0
    }

    pub(crate) fn summed(&self, device: &Device, mut x: Tensor, tag: Tag) -> Tensor {
        if !self.sequence {
            self.sum_over_tensor(&mut x);
            return x;
        }
        let mut own = device.empty(x.rows() / self.mesh.tensor, x.cols(), x.dtype(), tag);
        self.note(
            self.exchanged(|| floats::reduce_scatter(self.tensor(), x.view(), own.view_mut())),
        );
        own
    }

    pub(crate) fn tensor(&self) -> &Group {
        self.group(GroupKind::Tensor)
    }
}
