//! What a block is: the unit that is bucketed, gathered and freed, recomputed, and placed on a stage.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Tag, Tensor, View};
use lockstep_parallel::{Groups, Leaving};
use lockstep_plan::Recompute;
use lockstep_plan::context::Run;
use lockstep_plan::model::BlockParams;

use crate::{Auxiliary, WeightGrads};

/// A piece of a network between two places of the residual stream.
///
/// A user's own network is a list of these. Parameters lie in one flat buffer, in the order of `params`;
/// the block is told where they are at each call, because whoever holds them may move, gather or free them
/// in between.
pub trait Block {
    /// What a backward pass needs of the forward pass.
    type Saved;

    /// Names, dimensions and order of what lies in the flat buffer.
    fn params(&self) -> &BlockParams;

    /// From the stream (tokens, dim) to the stream, keeping what `recompute` does not rebuild.
    fn forward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: Tensor,
        recompute: Recompute,
    ) -> (Tensor, Self::Saved);

    /// From the gradient of the output to that of the input. Gradients of the weights go to the grads, which
    /// does them at once or keeps them for later.
    fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        saved: Self::Saved,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor;
}

/// Where and on what a pass works.
#[derive(Clone, Copy)]
pub struct Ctx<'a> {
    pub device: &'a Device,
    /// Who has the rest of what a block needs.
    pub groups: &'a Groups,
    /// Of activations.
    pub dtype: Dtype,
    /// Sequences in this micro-batch.
    pub batch: usize,
    /// The positions of each that are here: tokens lie run by run, in each run sequence by sequence.
    pub runs: &'a [Run],
    /// Present in training when the model wants it.
    pub dropout: Option<Dropout>,
    /// This micro-batch's part of the tokens of the global batch: the weight of its auxiliary losses.
    pub share: f32,
    /// What routers did, for their auxiliary losses; none when these are not wanted.
    pub auxiliary: Option<&'a RefCell<Auxiliary>>,
    /// Whether routers write there: not when a pass is computed again.
    pub counting: bool,
}

/// Which random numbers a pass drops by: a function of global positions, so that every layout drops alike.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    pub probability: f32,
    pub seed: u64,
    pub step: u64,
    /// Number of the micro-batch's first sequence within its step.
    pub first_sample: u64,
    /// Tokens of a whole sequence.
    pub seq: u64,
}

impl Ctx<'_> {
    /// Tokens of each sequence that are here.
    pub fn seq(&self) -> usize {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Of this micro-batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq()
    }

    /// The tokens whose residual stream this rank holds.
    pub fn stream(&self) -> Range<usize> {
        self.groups.stream_rows(self.tokens())
    }

    /// Each run, and the rows in which it lies.
    pub(crate) fn placed_runs(&self) -> impl Iterator<Item = (Run, Range<usize>)> {
        let batch = self.batch;
        self.runs.iter().scan(0, move |end, run| {
            let start = *end;
            *end += batch * run.len;
            Some((*run, start..*end))
        })
    }

    /// Something a backward pass will need.
    pub(crate) fn kept(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, self.dtype, Tag::Activations)
    }

    /// The same in f32 whatever the precision: statistics.
    pub(crate) fn kept_wide(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, Dtype::F32, Tag::Activations)
    }

    /// Something that lives for a moment.
    pub(crate) fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, self.dtype, Tag::Buffers)
    }

    /// Sums for all tokens that are to be made of ranks' parts of them.
    pub(crate) fn leaving(&self, cols: usize, tag: Tag) -> Leaving {
        Leaving { rows: self.tokens(), cols, dtype: self.dtype, tag }
    }

    /// The tensor, or a copy of it when others still read it.
    pub(crate) fn own(&self, tensor: Tensor) -> Tensor {
        if !tensor.is_shared() {
            return tensor;
        }
        let mut copy =
            self.device.empty(tensor.rows(), tensor.cols(), tensor.dtype(), Tag::Buffers);
        self.device.copy(tensor.view(), copy.view_mut());
        copy
    }

    /// Drops elements of the stream's rows of this rank in place; forward and backward alike. `site` tells
    /// one place of the network from another.
    pub(crate) fn drop_out(&self, site: u64, tensor: &mut Tensor) {
        let Some(dropout) = self.dropout else { return };
        let (rows, cols) = (self.stream(), tensor.cols());
        for (run, place) in self.placed_runs() {
            for sequence in 0..self.batch {
                let start = place.start + sequence * run.len;
                let (from, to) = (start.max(rows.start), (start + run.len).min(rows.end));
                if from >= to {
                    continue;
                }
                let sample = dropout.first_sample + sequence as u64;
                let token = sample * dropout.seq + (run.start + from - start) as u64;
                self.device.dropout(
                    tensor.view_mut().rows_of(from - rows.start..to - rows.start),
                    dropout.probability,
                    dropout.seed,
                    dropout.step << 16 | site,
                    token * cols as u64,
                );
            }
        }
    }
}
