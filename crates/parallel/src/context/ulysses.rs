//! Ulysses (Jacobs et al. 2023): an all-to-all turns some tokens with all heads into all tokens of the
//! neighbours with some heads, attention needs no further exchange, and another all-to-all turns back. Key heads
//! that are fewer than the neighbours go to all who need them, and their gradients are summed up.
//!
//! What it moves is (u-1)/u of each matrix, in one call each; bytes: [`lockstep_plan::context::ulysses_sent`].

use std::ops::Range;

use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};

use super::Heads;
use super::held::Span;
use super::wire::all_to_all;
use crate::exposed::Exposed;

/// How heads and tokens are dealt out among neighbours.
pub(super) struct Deal<'a> {
    pub group: &'a Group,
    pub device: &'a Device,
    /// With all heads.
    pub heads: Heads,
    /// Of the neighbours' rows, one after the other, in what they hold together.
    pub spans: Vec<Span>,
    pub exposed: &'a Exposed,
}

/// Columns that are heads side by side.
#[derive(Clone, Copy)]
pub(super) struct Block {
    first: usize,
    heads: usize,
    width: usize,
}

impl Block {
    pub fn qkv(heads: &Heads) -> [Block; 3] {
        let Heads { heads, kv_heads, head_dim: width, .. } = *heads;
        [
            Block { first: 0, heads, width },
            Block { first: heads * width, heads: kv_heads, width },
            Block { first: (heads + kv_heads) * width, heads: kv_heads, width },
        ]
    }

    pub fn out(heads: &Heads) -> [Block; 1] {
        [Block { first: 0, heads: heads.heads, width: heads.head_dim }]
    }

    /// One number per head.
    pub fn delta(heads: &Heads) -> [Block; 1] {
        [Block { first: 0, heads: heads.heads, width: 1 }]
    }

    /// The columns that a member needs.
    fn of(&self, member: usize, members: usize) -> Range<usize> {
        let each = (self.heads / members).max(1);
        let start = self.first + member * self.heads / members * self.width;
        start..start + each * self.width
    }

    fn columns(&self) -> Range<usize> {
        self.first..self.first + self.heads * self.width
    }
}

impl Deal<'_> {
    /// What a rank attends with.
    pub fn dealt(&self) -> Heads {
        let members = self.group.size();
        let Heads { heads, kv_heads, .. } = self.heads;
        Heads { heads: heads / members, kv_heads: (kv_heads / members).max(1), ..self.heads }
    }

    /// The columns of each member, side by side, member after member.
    pub fn packed(&self, from: View<'_>, blocks: &[Block]) -> Tensor {
        let (members, tokens) = (self.group.size(), from.rows());
        let mut packed = self.device.empty(
            members * tokens,
            self.dealt_columns(blocks),
            from.dtype(),
            Tag::Buffers,
        );
        for member in 0..members {
            let mut at = 0;
            for columns in blocks.iter().map(|block| block.of(member, members)) {
                let to = packed.view_mut().rows_of(member * tokens..(member + 1) * tokens);
                self.device.place_columns(from, columns.clone(), to, at);
                at += columns.len();
            }
        }
        packed
    }

    /// From what was packed to all tokens of the neighbours, with the heads that are this rank's.
    pub fn to_heads(&self, packed: Tensor, tag: Tag) -> Result<Tensor> {
        let mut apart = self.like(&packed);
        self.exposed.timed(|| all_to_all(self.group, &packed, &mut apart))?;
        drop(packed);
        let together = self.moved(apart, |span| (span.apart.clone(), span.together.clone()));
        together.retag(tag);
        Ok(together)
    }

    /// And back: all heads of this rank's tokens. What several have of one key head is summed up, in f32.
    pub fn to_tokens(&self, dealt: Tensor, blocks: &[Block], mut to: ViewMut<'_>) -> Result<()> {
        let apart = self.moved(dealt, |span| (span.together.clone(), span.apart.clone()));
        let mut received = self.like(&apart);
        self.exposed.timed(|| all_to_all(self.group, &apart, &mut received))?;
        drop(apart);
        let (members, tokens) = (self.group.size(), to.rows());
        let mut at = 0;
        for block in blocks {
            let len = block.of(0, members).len();
            let shared = block.heads < members;
            let mut sums = shared.then(|| {
                let columns = block.columns().len();
                self.device.zeros(tokens, columns, Dtype::F32, Tag::Buffers)
            });
            for member in 0..members {
                let from = received.view().rows_of(member * tokens..(member + 1) * tokens);
                let columns = block.of(member, members);
                match &mut sums {
                    None => {
                        self.device.place_columns(from, at..at + len, to.reborrow(), columns.start)
                    }
                    Some(sums) => {
                        let place = columns.start - block.first;
                        self.device.add_columns(from, at..at + len, sums.view_mut(), place);
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

    /// Columns of a dealt matrix.
    fn dealt_columns(&self, blocks: &[Block]) -> usize {
        blocks.iter().map(|block| block.of(0, self.group.size()).len()).sum()
    }

    fn like(&self, tensor: &Tensor) -> Tensor {
        self.device.empty(tensor.rows(), tensor.cols(), tensor.dtype(), Tag::Buffers)
    }

    /// Rows from their places to others; the same tensor where they stay.
    fn moved(
        &self,
        from: Tensor,
        places: impl Fn(&Span) -> (Range<usize>, Range<usize>),
    ) -> Tensor {
        if self.spans.iter().all(|span| span.apart == span.together) {
            return from;
        }
        let mut to = self.like(&from);
        for (source, target) in self.spans.iter().map(places) {
            self.device.copy(from.view().rows_of(source), to.view_mut().rows_of(target));
        }
        to
    }
}
