//! Gradient compression along the data axis, with error feedback: each rank keeps what rounding or selection did
//! not send as a residual and adds it to the next gradient (Seide et al., 1-bit SGD; Karimireddy et al., error
//! feedback). Summed over the steps, the applied gradients equal the gradients up to the last residuals.
//!
//! Two schemes:
//! - `quantized`: bf16, f16 and int8. Ranks send each shard to its owner, rounded; the owner sums in f32 and all ranks
//!   get the sum, rounded once more. A number is rounded twice, however many ranks there are.
//! - `topk`: every rank sends the elements that are largest relative to their usual size.
//!
//! Error feedback alone does not learn as fast as uncompressed gradients (Stich et al., Sparsified SGD with Memory): an
//! element that top-k did not select arrives late, summed over the steps that it waited for. Two measures of Lin et al.
//! (Deep Gradient Compression) compensate, and both belong to the plan: the first steps, in which gradients change
//! quickly, are not compressed (`comm.compression_warmup`), and there is no momentum on top of the delay
//! (`Plan::beta1`). Elements are ranked as Adam scales them: by their size relative to the root mean square of what was
//! sent from the same place before. Ranked by absolute size, the gradients of the embedding and the norms would be sent
//! all the time, and those of a matrix with small gradients never, though an optimizer step moves both equally far.
//! The mean squares are of what this rank has sent, so they are available wherever ZeRO stores the second moments.
//!
//! The fraction belongs to a reduction, not to a step. ZeRO 2 and 3 reduce after every micro-batch and so send more of a
//! step's gradient, and learn faster per step, than ZeRO 0 and 1 with the same fraction. After 200 steps of a Llama of
//! 0.14M parameters with `topk:0.02` on two replicas (loss without compression: 0.985), the loss is 1.44 with ZeRO-0,
//! 1.38 with ZeRO-2 and one micro-batch, and 1.02 with ZeRO-2 and four micro-batches, which send four times as much.
//!
//! A NaN or infinity in the gradient of any rank appears in the sum of all ranks; in f16 and int8 its whole chunk
//! becomes NaN, since they share a scale. It never enters the residual.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::{Device, ViewMut};
//! use lockstep_parallel::compress::Compressor;
//! use lockstep_plan::Compression;
//!
//! // Each rank sends 1 of 100 elements.
//! let steps = on_threads(2, |world| {
//!     let compression = Compression::TopK(0.01);
//!     let mut compressor = Compressor::new(&Device::cpu(1), compression, 100, world.size());
//!     [0; 2].map(|_| {
//!         let mut gradient = vec![0.0f32; 100];
//!         (gradient[3], gradient[7]) = (1.0, 0.75);
//!         compressor.all_reduce(&world, ViewMut::of(&mut gradient)).unwrap();
//!         (gradient[3], gradient[7])
//!     })
//! });
//! // The element that waited in the first step is sent with the second gradient.
//! assert_eq!(steps, [[(2.0, 0.0), (0.0, 3.0)]; 2]);
//! ```

mod quantized;
mod topk;

use crate::collectives;
use lockstep_comm::{Group, Op, Result};
use lockstep_kernels::{Code, Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::Compression;
use quantized::Quantized;
use std::ops::Range;
use topk::TopK;

/// State that a rank's compressor carries from step to step. It belongs in a checkpoint, like the moments of an
/// optimizer: without it, a resumed run is off by one step's rounding or selection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompressorState {
    /// Gradients that were not sent yet. Only the sum over all ranks matters: on another number of ranks, any split
    /// with the same sum is correct.
    Residual,
    /// Top-k only: decaying means of the squares of what was sent from each place. Only their ratios matter: another
    /// number of ranks may use the sum over all ranks.
    MeanSquares,
}

/// Reduces one buffer over a group, step after step, in the form that the plan asks for. Compresses f32 only: bf16
/// gradients are sent as they are.
pub struct Compressor {
    device: Device,
    compression: Compression,
    /// Compression is off for now: a warm-up step.
    bypassed: bool,
    ranks: usize,
    len: usize,
    /// (len) residual; for top-k followed by (len) mean squares. Empty without compression.
    state: Tensor,
}

impl Compressor {
    /// For a buffer of `len` elements and a group of `ranks`. A group of one sends nothing and so loses nothing.
    pub fn new(device: &Device, compression: Compression, len: usize, ranks: usize) -> Compressor {
        let compression = if ranks == 1 { Compression::None } else { compression };
        let state = device.zeros(1, compression.state_rows() * len, Dtype::F32, Tag::Buffers);
        Compressor { device: device.clone(), compression, bypassed: false, ranks, len, state }
    }

    /// Turns compression off, or on again. The residual stays as it is meanwhile.
    pub fn bypass(&mut self, yes: bool) {
        self.bypassed = yes;
    }

    /// Sums `buffer` over the group, to the same bits on all ranks.
    ///
    /// With n = ⌈len/P⌉, each rank sends 2(P-1) times 2n bytes in bf16, 2n + 4⌈n/256⌉ in f16 and n + 4⌈n/256⌉ in int8,
    /// in 2(P-1) steps; (P-1) · 8k bytes with top-k, in P-1 steps.
    pub fn all_reduce(&mut self, group: &Group, buffer: ViewMut<'_>) -> Result<()> {
        self.check(group, buffer.len());
        match self.scheme_of(buffer.as_view()) {
            Scheme::Uncompressed => collectives::all_reduce(&self.device, group, buffer, Op::Sum),
            Scheme::Quantized(code) => self.quantized(group, code).all_reduce(buffer),
            Scheme::TopK => self.topk(group).all_reduce(buffer),
        }
    }

    /// Sums `input` over the group; `output` becomes this rank's shard (`lockstep_comm::shard_range`) of the sum.
    ///
    /// Quantized: the first half of [`Compressor::all_reduce`], and one rounding less. Top-k: ranks exchange counts, 8(P-1)
    /// bytes, and send each owner only the pairs of its shard: at most 8k bytes, (P-1)/P of that if evenly distributed.
    pub fn reduce_scatter(
        &mut self,
        group: &Group,
        input: View<'_>,
        output: ViewMut<'_>,
    ) -> Result<()> {
        self.check(group, input.len());
        match self.scheme_of(input) {
            Scheme::Uncompressed => collectives::reduce_scatter(&self.device, group, input, output),
            Scheme::Quantized(code) => self.quantized(group, code).reduce_scatter(input, output),
            Scheme::TopK => self.topk(group).reduce_scatter(input, output),
        }
    }

    /// One kind of state; empty where the compression has none.
    pub fn state(&self, kind: CompressorState) -> View<'_> {
        self.state.view().part(self.range(kind))
    }

    /// One kind of state, to load it.
    pub fn state_mut(&mut self, kind: CompressorState) -> ViewMut<'_> {
        let range = self.range(kind);
        self.state.view_mut().part(range)
    }

    fn range(&self, kind: CompressorState) -> Range<usize> {
        let all = self.state.len();
        match kind {
            CompressorState::Residual => 0..self.len.min(all),
            CompressorState::MeanSquares => self.len.min(all)..all,
        }
    }

    /// The scheme for a gradient. While compression is bypassed, the mean squares follow the gradients for the time
    /// when it is on again.
    fn scheme_of(&mut self, x: View<'_>) -> Scheme {
        let scheme = scheme(self.compression);
        if x.dtype() != Dtype::F32 {
            return Scheme::Uncompressed;
        }
        if !self.bypassed {
            return scheme;
        }
        if let Scheme::TopK = scheme {
            self.device.follow_squares(x, self.state.view_mut().split_at(self.len).1);
        }
        Scheme::Uncompressed
    }

    fn check(&self, group: &Group, len: usize) {
        assert_eq!(self.ranks, group.size(), "the compressor was made for another number of ranks");
        assert_eq!(self.len, len, "the compressor was made for a buffer of another length");
    }

    fn quantized<'a>(&'a mut self, group: &'a Group, code: Code) -> Quantized<'a> {
        Quantized { device: &self.device, group, code, residual: self.state.view_mut() }
    }

    fn topk<'a>(&'a mut self, group: &'a Group) -> TopK<'a> {
        let k = self.compression.selected(self.len);
        let (residual, squares) = self.state.view_mut().split_at(self.len);
        TopK { device: &self.device, group, k, residual, squares }
    }
}

enum Scheme {
    Uncompressed,
    Quantized(Code),
    TopK,
}

fn scheme(compression: Compression) -> Scheme {
    match compression {
        Compression::None => Scheme::Uncompressed,
        Compression::Bf16 => Scheme::Quantized(Code::Bf16),
        Compression::F16 => Scheme::Quantized(Code::F16),
        Compression::Int8 => Scheme::Quantized(Code::Int8),
        Compression::TopK(_) => Scheme::TopK,
    }
}

/// A temporary buffer from the device's pool.
fn bytes(device: &Device, len: usize) -> Tensor {
    device.empty(1, len, Dtype::U8, Tag::Buffers)
}
