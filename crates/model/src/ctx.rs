//! The context of a call to a block: device, groups, weights, and the tokens of the micro-batch.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_kernels::{Device, DropoutMask, Dtype, RandomKey, Tag, Tensor, View};
use lockstep_parallel::{Groups, PartialOutput};
use lockstep_plan::context::Run;
use lockstep_plan::{Recompute, keeps_cheap};

use crate::{Auxiliary, ExpertLoads, Fp8};

/// The context of a call to a block.
#[derive(Clone, Copy)]
pub struct Ctx<'a> {
    pub device: &'a Device,
    /// This rank's process groups.
    pub groups: &'a Groups,
    /// The block's flat parameters; empty in a backward pass that does not read them.
    pub weights: View<'a>,
    /// A matrix that the block shares with another one (see `BlockParams::tied`).
    pub shared: Option<View<'a>>,
    /// Type of activations.
    pub dtype: Dtype,
    pub recompute: Recompute,
    /// Sequences in this micro-batch.
    pub batch: usize,
    /// Positions of each sequence on this rank. Tokens are ordered by run, then by sequence.
    pub runs: &'a [Run],
    /// Token ids of the micro-batch (1, tokens), u32.
    pub inputs: View<'a>,
    /// Token to predict at each position (1, tokens), u32. Without targets, the head returns logits.
    pub targets: Option<View<'a>>,
    /// Gradient of the objective by the loss of one token: 1 / tokens of the global batch.
    pub loss_scale: f32,
    /// Set in training if the model uses dropout.
    pub dropout: Option<Dropout>,
    /// This micro-batch's share of the tokens of the global batch: the weight of its auxiliary losses.
    pub share: f32,
    /// Receives the routers' auxiliary losses; none in inference.
    pub auxiliary: Option<&'a RefCell<Auxiliary>>,
    /// Receives the loads of the experts, and has those of the previous step.
    pub loads: Option<&'a ExpertLoads>,
    /// Set in training if linear layers multiply in fp8.
    pub fp8: Option<Fp8<'a>>,
    /// Whether the forward pass runs a second time, for the backward pass.
    pub recomputing: bool,
}

/// The random numbers of dropout. They are a function of global positions, so every layout drops the same elements.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    pub probability: f32,
    pub seed: u64,
    pub step: u64,
    /// Index of the micro-batch's first sequence within its step.
    pub first_sample: u64,
    /// Tokens of a whole sequence.
    pub seq: u64,
}

impl Ctx<'_> {
    /// Whether values that are cheap to compute again are saved too.
    pub fn keeps_cheap(&self) -> bool {
        keeps_cheap(self.device.device_type(), self.recompute)
    }

    /// Whether fp8 inputs of linear layers are saved for the backward pass, in place of those in the compute type.
    pub fn saves_fp8(&self) -> bool {
        self.fp8.is_some() && self.recompute == Recompute::None
    }

    /// Tokens of each sequence on this rank.
    pub fn seq(&self) -> usize {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Tokens of this micro-batch on this rank.
    pub fn tokens(&self) -> usize {
        self.batch * self.seq()
    }

    /// The tokens whose residual stream this rank holds: fewer than all with sequence parallelism.
    pub fn stream(&self) -> Range<usize> {
        self.groups.stream_rows(self.tokens())
    }

    /// Each run with its range of rows.
    pub fn placed_runs(&self) -> impl Iterator<Item = (Run, Range<usize>)> {
        let batch = self.batch;
        self.runs.iter().scan(0, move |end, run| {
            let start = *end;
            *end += batch * run.len;
            Some((*run, start..*end))
        })
    }

    /// A tensor that is saved for the backward pass, or the output of a block.
    pub fn saved(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, self.dtype, Tag::Activations)
    }

    /// An f32 tensor that is saved for the backward pass, such as statistics.
    pub fn saved_f32(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, Dtype::F32, Tag::Activations)
    }

    /// A temporary tensor.
    pub fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, self.dtype, Tag::Buffers)
    }

    /// A temporary f32 tensor.
    pub fn scratch_f32(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, Dtype::F32, Tag::Buffers)
    }

    /// The output of all tokens that is a sum over the ranks of the tensor axis.
    pub(crate) fn partial_output(&self, cols: usize, tag: Tag) -> PartialOutput {
        PartialOutput { rows: self.tokens(), cols, dtype: self.dtype, tag }
    }

    /// The tensor, or a copy if other handles to it exist, so that it can be written.
    pub fn writable(&self, tensor: Tensor) -> Tensor {
        if !tensor.is_shared() {
            return tensor;
        }
        let mut copy =
            self.device.empty(tensor.rows(), tensor.cols(), tensor.dtype(), Tag::Buffers);
        self.device.copy(tensor.view(), copy.view_mut());
        copy
    }

    /// Applies dropout to this rank's rows of the stream in place, in the forward and in the backward pass. `site` is
    /// unique for each place in the model; a layer uses `2 * number - 1` and `2 * number`.
    pub fn drop_out(&self, site: u64, tensor: &mut Tensor) {
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
                let key = RandomKey { seed: dropout.seed, stream: dropout.step << 16 | site };
                let first = token * cols as u64;
                let mask = DropoutMask { key, p: dropout.probability, first };
                let rows = tensor.view_mut().rows_of(from - rows.start..to - rows.start);
                self.device.dropout(rows, &mask);
            }
        }
    }
}
