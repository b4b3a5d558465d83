//! The last block: norm, output projection and cross-entropy, in chunks of tokens so that the logits of a
//! whole micro-batch never exist at once.

use std::ops::Range;

use lockstep_kernels::{CrossEntropy, Dtype, Gradient, Matmul, Tag, Tensor, View, ViewMut};
use lockstep_plan::model::{BlockParams, Part, Shape, loss_chunk};

use crate::norm::Norm;
use crate::{Ctx, WeightGrads};

pub(crate) struct Head {
    norm: Norm,
    /// (vocab, dim); none when the token embedding, on this rank too, is the output projection.
    pub output: Option<Range<usize>>,
    /// Logits that are computed here, and the token of the first.
    vocab: usize,
    first: usize,
    /// The most that any rank has: all must cut tokens into the same chunks.
    widest: usize,
}

impl Head {
    pub fn new(shape: &Shape, part: &Part, params: &BlockParams) -> Head {
        let has_output = params.params.iter().any(|param| param.name == "output");
        let vocab = shape.vocab_on_rank(&part.mesh, part.coord);
        Head {
            norm: Norm::new(params, "norm", shape.norm_eps),
            output: has_output.then(|| params.range("output")),
            vocab: vocab.len(),
            first: vocab.start,
            widest: shape.vocab.div_ceil(part.mesh.tensor),
        }
    }

    /// The logits of all tokens: for a caller who wants to see them.
    pub fn logits(&self, cx: &Ctx<'_>, weights: View<'_>, output: View<'_>, x: &Tensor) -> Tensor {
        assert_eq!(
            cx.groups.mesh.tensor, 1,
            "logits of the whole vocabulary are asked of one rank"
        );
        let normed = self.normed(cx, weights, x).0;
        let mut logits = cx.device.empty(x.rows(), self.vocab, Dtype::F32, Tag::Buffers);
        cx.device.matmul(Matmul::linear(normed.view(), output, logits.view_mut()));
        logits
    }

    /// The loss of each token (tokens), f32.
    pub fn losses(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        output: View<'_>,
        x: &Tensor,
        targets: View<'_>,
    ) -> Tensor {
        let normed = cx.groups.enter(cx.device, self.normed(cx, weights, x).0);
        let mut losses = cx.device.empty(1, cx.tokens(), Dtype::F32, Tag::Buffers);
        self.in_chunks(cx, cx.tokens(), |range, mut logits| {
            let rows = normed.view().rows_of(range.clone());
            cx.device.matmul(Matmul::linear(rows, output, logits.reborrow()));
            let work = CrossEntropy {
                logits,
                targets: targets.part(range.clone()),
                losses: losses.view_mut().part(range),
                gradient: Gradient::None,
            };
            cx.groups.cross_entropy(cx.device, work, self.first);
        });
        losses
    }

    /// The loss of each token, and the backward pass at once: each chunk's logits become their own gradient,
    /// times `scale`. Gives the losses and the gradient of `x`.
    #[allow(clippy::too_many_arguments)]
    pub fn train(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        output: View<'_>,
        x: Tensor,
        targets: View<'_>,
        scale: f32,
        grads: &mut WeightGrads<'_>,
        mut doutput: OutputGradient<'_>,
    ) -> (Tensor, Tensor) {
        let device = cx.device;
        let (normed, stats) = self.normed(cx, weights, &x);
        let normed = cx.groups.enter(device, normed);
        let mut losses = device.empty(1, cx.tokens(), Dtype::F32, Tag::Buffers);
        let mut dnormed = cx.scratch(cx.tokens(), x.cols());
        self.in_chunks(cx, cx.tokens(), |range, mut logits| {
            let rows = normed.view().rows_of(range.clone());
            device.matmul(Matmul::linear(rows, output, logits.reborrow()));

            // In bf16 the gradient takes half the room and needs a place of its own; in f32 it lies where
            // the logits were.
            let mut narrow = (cx.dtype != Dtype::F32)
                .then(|| device.empty(range.len(), self.vocab, cx.dtype, Tag::Buffers));
            let work = CrossEntropy {
                logits: logits.reborrow(),
                targets: targets.part(range.clone()),
                losses: losses.view_mut().part(range.clone()),
                gradient: match &mut narrow {
                    Some(narrow) => Gradient::Into(narrow.view_mut(), scale),
                    None => Gradient::InPlace(scale),
                },
            };
            cx.groups.cross_entropy(device, work, self.first);
            let dlogits = narrow.as_ref().map_or(logits.as_view(), Tensor::view);

            let drows = dnormed.view_mut().rows_of(range.clone());
            device.matmul(Matmul::linear_dx(dlogits, output, drows));
            let dw = doutput.place.reborrow();
            device.matmul(Matmul {
                accumulate: doutput.filled,
                ..Matmul::linear_dw(dlogits, rows, dw)
            });
            doutput.filled = true;
        });
        drop(normed);
        let dnormed = cx.groups.enter_backward(device, dnormed);
        let mut dx = device.empty(x.rows(), x.cols(), cx.dtype, Tag::Buffers);
        device.fill(dx.view_mut(), 0.0);
        self.norm.backward(cx, weights, &x, &stats, dnormed.view(), dx.view_mut(), grads);
        (losses, dx)
    }

    fn normed(&self, cx: &Ctx<'_>, weights: View<'_>, x: &Tensor) -> (Tensor, Tensor) {
        let mut stats = cx.device.empty(x.rows(), self.norm.stats(), Dtype::F32, Tag::Buffers);
        let mut normed = cx.device.empty(x.rows(), x.cols(), cx.dtype, Tag::Buffers);
        self.norm.forward(cx.device, weights, x.view(), normed.view_mut(), stats.view_mut());
        (normed, stats)
    }

    /// Calls `work` with each chunk of tokens and room for its logits.
    fn in_chunks(
        &self,
        cx: &Ctx<'_>,
        tokens: usize,
        mut work: impl FnMut(Range<usize>, ViewMut<'_>),
    ) {
        let chunk = loss_chunk(tokens, self.widest);
        let mut logits = cx.device.empty(chunk, self.vocab, Dtype::F32, Tag::Buffers);
        for start in (0..tokens).step_by(chunk) {
            let end = (start + chunk).min(tokens);
            work(start..end, logits.view_mut().rows_of(0..end - start));
        }
    }
}

/// Where the output projection's gradient goes, and whether there is something to add to.
pub(crate) struct OutputGradient<'a> {
    pub place: ViewMut<'a>, // (vocab, dim)
    pub filled: bool,
}
