//! The last block: norm, output projection and cross-entropy. The loss is computed in chunks of tokens, so that the
//! logits of a whole micro-batch never exist at the same time.

use std::ops::Range;

use lockstep_kernels::{
    CrossEntropy, DeviceType, Dtype, FP8_MULTIPLE, Fp8Cast, Fp8Copies, Fp8Source, Fp8Tensor,
    LogitGradient, Matmul, Tag, Tensor, View, ViewMut,
};
use lockstep_plan::model::{BlockParams, loss_chunk};

use crate::fp8::Fp8Operand;
use crate::norm::{Norm, NormBackward};
use crate::{Block, Ctx, Slot, WeightGrads};

pub(crate) struct Head {
    params: BlockParams,
    norm: Norm,
    /// (vocab, dim); none if the output projection is shared with the embedding on the same rank.
    output: Option<Range<usize>>,
    vocab: HeadVocab,
    dim: usize,
}

/// The logits that a rank computes.
pub(crate) struct HeadVocab {
    /// Range of the vocabulary.
    pub range: Range<usize>,
    /// Length of the longest range on any rank: all ranks must choose the same chunks.
    pub longest: usize,
}

/// Gradient of the objective by the losses.
enum LossGradient<'a> {
    Uniform(f32),
    PerToken(View<'a>), // (1, tokens), f32
}

impl Head {
    pub fn new(params: BlockParams, vocab: HeadVocab, eps: f64) -> Head {
        Head {
            norm: Norm::new(&params, "norm", eps),
            output: params.get("output").map(|_| params.range("output")),
            vocab,
            dim: params.range("norm.gain").len(),
            params,
        }
    }

    /// The output projection (vocab, dim).
    fn output<'a>(&self, cx: &Ctx<'a>) -> View<'a> {
        match &self.output {
            Some(range) => cx.weights.part(range.clone()).shaped(self.vocab.range.len(), self.dim),
            None => cx.shared.expect("the head has an output projection or shares one"),
        }
    }

    /// The gradient of the output projection, and whether to add to it.
    fn output_gradient<'a>(&self, grads: &'a mut WeightGrads<'_>) -> (ViewMut<'a>, bool) {
        match &self.output {
            Some(range) => {
                let (place, accumulate) = grads.place(range.clone());
                (place.shaped(self.vocab.range.len(), self.dim), accumulate)
            }
            None => grads.shared_place(),
        }
    }

    /// The logits of all tokens (tokens, vocab), f32.
    fn logits(&self, cx: &Ctx<'_>, x: &Tensor) -> Tensor {
        assert_eq!(cx.groups.mesh.tensor, 1, "logits need the whole vocabulary on one rank");
        let normed = self.norm.forward_temporary(cx, x).0;
        let mut logits = cx.scratch_f32(x.rows(), self.vocab.range.len());
        cx.device.matmul(Matmul::linear(normed.view(), self.output(cx), logits.view_mut()));
        logits
    }

    /// The loss of each token (1, tokens), f32.
    fn losses(&self, cx: &Ctx<'_>, x: &Tensor, targets: View<'_>) -> Tensor {
        let normed = cx.groups.gather_sequence(cx.device, self.norm.forward_temporary(cx, x).0);
        let mut losses = cx.scratch_f32(1, cx.tokens());
        self.for_each_chunk(cx, |range, mut logits| {
            let rows = normed.view().rows_of(range.clone());
            cx.device.matmul(Matmul::linear(rows, self.output(cx), logits.reborrow()));
            let work = CrossEntropy {
                logits,
                targets: targets.part(range.clone()),
                losses: losses.view_mut().part(range),
                gradient: LogitGradient::None,
            };
            cx.groups.cross_entropy(cx.device, work, self.vocab.range.start);
        });
        losses
    }

    /// The loss of each token and the gradient of `x`. The logits of each chunk become their own gradient.
    fn losses_and_gradient(
        &self,
        cx: &Ctx<'_>,
        x: &Tensor,
        dlosses: LossGradient<'_>,
        grads: &mut WeightGrads<'_>,
    ) -> (Tensor, Tensor) {
        let device = cx.device;
        let targets = cx.targets.expect("training needs targets");
        let scale = match dlosses {
            LossGradient::Uniform(scale) => scale,
            LossGradient::PerToken(_) => 1.0,
        };
        let (normed, stats) = self.norm.forward_temporary(cx, x);
        let normed = cx.groups.gather_sequence(device, normed);
        let mut losses = cx.scratch_f32(1, cx.tokens());
        let mut dnormed = cx.scratch(cx.tokens(), x.cols());
        let fp8 = cx.fp8.filter(|fp8| fp8.head).map(|_| self.fp8_output(cx));
        self.for_each_chunk(cx, |range, mut logits| {
            let rows = normed.view().rows_of(range.clone());
            let rows8 = fp8.as_ref().map(|_| self.fp8_cast(cx, Fp8Operand::Input, rows));
            match (&rows8, &fp8) {
                (Some(rows), Some(output)) => {
                    device.matmul(Matmul::fp8_linear(rows, output, logits.reborrow()))
                }
                _ => device.matmul(Matmul::linear(rows, self.output(cx), logits.reborrow())),
            }

            // A gradient of the logits' type replaces them; another one needs a buffer of its own.
            let mut converted = (cx.dtype != logits.dtype())
                .then(|| cx.scratch(range.len(), self.vocab.range.len()));
            let work = CrossEntropy {
                logits: logits.reborrow(),
                targets: targets.part(range.clone()),
                losses: losses.view_mut().part(range.clone()),
                gradient: match &mut converted {
                    Some(converted) => LogitGradient::Into(converted.view_mut(), scale),
                    None => LogitGradient::InPlace(scale),
                },
            };
            cx.groups.cross_entropy(device, work, self.vocab.range.start);
            let mut dlogits = converted.as_mut().map_or(logits, Tensor::view_mut);
            if let LossGradient::PerToken(dlosses) = dlosses {
                let factors = dlosses.part(range.clone()).shaped(range.len(), 1);
                device.scale_rows(dlogits.reborrow(), factors);
            }

            let drows = dnormed.view_mut().rows_of(range.clone());
            let (place, accumulate) = self.output_gradient(grads);
            let accumulate = accumulate || range.start > 0;
            match (&rows8, &fp8) {
                (Some(rows), Some(output)) => {
                    let dlogits = self.fp8_cast(cx, Fp8Operand::Gradient, dlogits.as_view());
                    device.matmul(Matmul::fp8_linear_dx(&dlogits, output, drows));
                    let product = Matmul::fp8_linear_dw(&dlogits, rows, place);
                    device.matmul(Matmul { accumulate, ..product });
                }
                _ => {
                    device.matmul(Matmul::linear_dx(dlogits.as_view(), self.output(cx), drows));
                    let product = Matmul::linear_dw(dlogits.as_view(), rows, place);
                    device.matmul(Matmul { accumulate, ..product });
                }
            }
        });
        drop(normed);
        let dnormed = cx.groups.gather_sequence_backward(device, dnormed);
        let mut dx = cx.scratch(x.rows(), x.cols());
        device.fill(dx.view_mut(), 0.0);
        let (dy, of_x) = (dnormed.view(), dx.view_mut());
        self.norm.backward(
            cx,
            NormBackward { x, stats: &stats, dy, dx: of_x, bias_before: None },
            grads,
        );
        (losses, dx)
    }

    /// The output projection in fp8.
    fn fp8_output(&self, cx: &Ctx<'_>) -> Fp8Tensor {
        self.fp8_cast(cx, Fp8Operand::Weight, self.output(cx))
    }

    fn fp8_cast(&self, cx: &Ctx<'_>, operand: Fp8Operand, x: View<'_>) -> Fp8Tensor {
        cx.device.fp8_cast(Fp8Cast {
            from: Fp8Source::Whole(x),
            format: operand.format(),
            copies: Fp8Copies::Both,
            tag: Tag::Buffers,
            column_sums: None,
            history: cx.fp8_history(self.params.number, 0, operand),
        })
    }

    /// Calls `work` with each chunk of tokens and a buffer for its logits.
    fn for_each_chunk(&self, cx: &Ctx<'_>, mut work: impl FnMut(Range<usize>, ViewMut<'_>)) {
        let tokens = cx.tokens();
        let mut chunk = loss_chunk(cx.device.device_type(), tokens, self.vocab.longest);
        if cx.fp8.is_some_and(|fp8| fp8.head) {
            chunk = chunk.next_multiple_of(FP8_MULTIPLE);
        }
        // On a GPU the time of the loss is that of moving the logits.
        let dtype = match cx.device.device_type() {
            DeviceType::Cpu => Dtype::F32,
            DeviceType::Cuda => cx.dtype,
        };
        let mut logits = cx.device.empty(chunk, self.vocab.range.len(), dtype, Tag::Buffers);
        for start in (0..tokens).step_by(chunk) {
            let end = (start + chunk).min(tokens);
            work(start..end, logits.view_mut().rows_of(0..end - start));
        }
    }
}

impl Block for Head {
    fn params(&self) -> &BlockParams {
        &self.params
    }

    /// The loss of each token (1, tokens), or without targets the logits (tokens, vocab); both f32.
    fn forward(&self, cx: &Ctx<'_>, x: Tensor, saved: &mut Slot) -> Tensor {
        let y = match cx.targets {
            Some(targets) => self.losses(cx, &x, targets),
            None => self.logits(cx, &x),
        };
        saved.put(x);
        y
    }

    fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: &mut Slot,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Option<Tensor> {
        let (x, dlosses): (Tensor, _) = (saved.take(), LossGradient::PerToken(dy.view()));
        Some(self.losses_and_gradient(cx, &x, dlosses, grads).1)
    }

    fn loss_and_backward(
        &self,
        cx: &Ctx<'_>,
        x: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> (Tensor, Option<Tensor>) {
        let dlosses = LossGradient::Uniform(cx.loss_scale);
        let (losses, dx) = self.losses_and_gradient(cx, &x, dlosses, grads);
        (losses, Some(dx))
    }
}
