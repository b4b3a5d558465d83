//! Ulysses attention (Jacobs et al. 2023): an all-to-all turns some tokens with all heads into all tokens of the group
//! with some heads, attention runs locally, and another all-to-all turns back. If there are fewer key heads than ranks,
//! each is sent to all ranks that need it, and its gradients are summed.
//!
//! Sends (u-1)/u of each matrix, in one call each; bytes: [`lockstep_plan::context::ulysses_sent`].

use std::ops::Range;

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};

use super::Heads;
use super::layout::Span;
use crate::collectives::all_to_all;
use crate::exposed::Exposed;

/// The exchange of heads for tokens in a group.
pub(super) struct HeadExchange<'a> {
    pub group: &'a Group,
    pub device: &'a Device,
    /// All heads of this rank.
    pub heads: Heads,
    /// From the concatenated rows of the group's ranks to the rows of their combined runs.
    pub spans: Vec<Span>,
    pub exposed: &'a Exposed,
}

/// Adjacent columns that hold heads.
#[derive(Clone, Copy)]
pub(super) struct HeadColumns {
    first: usize,
    heads: usize,
    width: usize,
}

impl HeadColumns {
    pub fn qkv(heads: &Heads) -> [HeadColumns; 3] {
        let Heads { heads, kv_heads, head_dim: width, .. } = *heads;
        [
            HeadColumns { first: 0, heads, width },
            HeadColumns { first: heads * width, heads: kv_heads, width },
            HeadColumns { first: (heads + kv_heads) * width, heads: kv_heads, width },
        ]
    }

    pub fn out(heads: &Heads) -> [HeadColumns; 1] {
        [HeadColumns { first: 0, heads: heads.heads, width: heads.head_dim }]
    }

    /// One number per head.
    pub fn delta(heads: &Heads) -> [HeadColumns; 1] {
        [HeadColumns { first: 0, heads: heads.heads, width: 1 }]
    }

    /// The columns that a rank needs.
    fn of_rank(&self, rank: usize, ranks: usize) -> Range<usize> {
        let each = (self.heads / ranks).max(1);
        let start = self.first + rank * self.heads / ranks * self.width;
        start..start + each * self.width
    }

    fn columns(&self) -> usize {
        self.heads * self.width
    }
}

impl HeadExchange<'_> {
    /// The heads with which this rank attends.
    pub fn local_heads(&self) -> Heads {
        let ranks = self.group.size();
        let Heads { heads, kv_heads, .. } = self.heads;
        Heads { heads: heads / ranks, kv_heads: (kv_heads / ranks).max(1), ..self.heads }
    }

    /// The columns of each rank, rank after rank.
    pub fn pack(&self, from: View<'_>, blocks: &[HeadColumns]) -> Tensor {
        let (ranks, tokens) = (self.group.size(), from.rows());
        let cols = blocks.iter().map(|block| block.of_rank(0, ranks).len()).sum();
        let mut packed = self.device.empty(ranks * tokens, cols, from.dtype(), Tag::Buffers);
        for rank in 0..ranks {
            let mut at = 0;
            for columns in blocks.iter().map(|block| block.of_rank(rank, ranks)) {
                let to = packed.view_mut().rows_of(rank * tokens..(rank + 1) * tokens);
                self.device.place_columns(from, columns.clone(), to, at);
                at += columns.len();
            }
        }
        packed
    }

    /// Exchanges packed columns for all tokens of the group with this rank's heads.
    pub fn to_heads(&self, packed: Tensor, tag: Tag) -> Result<Tensor> {
        let by_rank = self.all_to_all(packed)?;
        let combined = self.reorder(by_rank, |span| (span.by_rank.clone(), span.combined.clone()));
        combined.retag(tag);
        Ok(combined)
    }

    /// The inverse: all heads of this rank's tokens. Contributions of several ranks to one key head are summed in f32.
    pub fn to_tokens(
        &self,
        local: Tensor,
        blocks: &[HeadColumns],
        mut to: ViewMut<'_>,
    ) -> Result<()> {
        let by_rank = self.reorder(local, |span| (span.combined.clone(), span.by_rank.clone()));
        let received = self.all_to_all(by_rank)?;
        let (ranks, tokens) = (self.group.size(), to.rows());
        let mut at = 0;
        for block in blocks {
            let len = block.of_rank(0, ranks).len();
            let shared = block.heads < ranks;
            let mut sums = shared
                .then(|| self.device.zeros(tokens, block.columns(), Dtype::F32, Tag::Buffers));
            for rank in 0..ranks {
                let from = received.view().rows_of(rank * tokens..(rank + 1) * tokens);
                let first = block.of_rank(rank, ranks).start;
                match &mut sums {
                    None => self.device.place_columns(from, at..at + len, to.reborrow(), first),
                    Some(sums) => {
                        let first = first - block.first;
                        self.device.add_columns(from, at..at + len, sums.view_mut(), first);
                    }
                }
            }
            if let Some(sums) = sums {
                self.device.place_columns(sums.view(), 0..sums.cols(), to.reborrow(), block.first);
            }
            at += len;
        }
        Ok(())
    }

    fn all_to_all(&self, input: Tensor) -> Result<Tensor> {
        let mut output = self.like(&input);
        self.exposed.timed(CommAxis::Context, || {
            all_to_all(self.device, self.group, input.view(), output.view_mut())
        })?;
        Ok(output)
    }

    fn like(&self, tensor: &Tensor) -> Tensor {
        self.device.empty(tensor.rows(), tensor.cols(), tensor.dtype(), Tag::Buffers)
    }

    /// Copies rows from one order to the other; returns the same tensor if the orders are equal.
    fn reorder(
        &self,
        from: Tensor,
        ranges: impl Fn(&Span) -> (Range<usize>, Range<usize>),
    ) -> Tensor {
        if self.spans.iter().all(|span| span.by_rank == span.combined) {
            return from;
        }
        let mut to = self.like(&from);
        for (source, target) in self.spans.iter().map(ranges) {
            self.device.copy(from.view().rows_of(source), to.view_mut().rows_of(target));
        }
        to
    }
}
