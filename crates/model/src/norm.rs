//! Normalization: LayerNorm if the block has a bias for it, RMSNorm otherwise.

use std::ops::Range;

use lockstep_kernels::{NormGradients, NormParams, Tensor, View, ViewMut};
use lockstep_plan::model::BlockParams;

use crate::{Ctx, WeightGrads};

pub(crate) struct Norm {
    gain: Range<usize>,
    bias: Option<Range<usize>>,
    eps: f32,
}

/// Values that a norm saves for its backward pass.
pub(crate) struct SavedNorm {
    pub stats: Tensor, // (rows, 1 or 2), f32
    /// None if it is recomputed.
    out: Option<Tensor>, // (rows, dim)
}

impl SavedNorm {
    /// Calls `visit` with all tensors.
    pub fn tensors(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        visit(&mut self.stats);
        self.out.iter_mut().for_each(visit);
    }
}

/// Operands of the backward pass.
pub(crate) struct NormBackward<'a> {
    pub x: &'a Tensor,
    pub stats: &'a Tensor,
    pub dy: View<'a>,
    /// The gradient of the residual stream, to which that of the input is added.
    pub dx: ViewMut<'a>,
    /// The bias of the linear layer whose output was added to `x`, if its gradient is the sum of the columns of the new
    /// `dx`. It precedes the gain.
    pub bias_before: Option<Range<usize>>,
}

impl Norm {
    pub fn new(params: &BlockParams, name: &str, eps: f64) -> Norm {
        let bias = format!("{name}.bias");
        Norm {
            gain: params.range(&format!("{name}.gain")),
            bias: params.get(&bias).map(|_| params.range(&bias)),
            eps: eps as f32,
        }
    }

    /// Statistics of each row.
    fn stats(&self) -> usize {
        if self.bias.is_some() { 2 } else { 1 }
    }

    /// The norm of `x`, and what is saved of it: statistics, and if it `keeps` the output, that too.
    pub fn forward(&self, cx: &Ctx<'_>, x: &Tensor, keeps: bool) -> (Tensor, SavedNorm) {
        let mut stats = cx.saved_f32(x.rows(), self.stats());
        let mut out =
            if keeps { cx.saved(x.rows(), x.cols()) } else { cx.scratch(x.rows(), x.cols()) };
        self.forward_into(cx, x.view(), out.view_mut(), stats.view_mut());
        let saved = SavedNorm { stats, out: keeps.then(|| out.clone()) };
        (out, saved)
    }

    /// The norm of `x` and its statistics, both temporary.
    pub fn forward_temporary(&self, cx: &Ctx<'_>, x: &Tensor) -> (Tensor, Tensor) {
        let mut stats = cx.scratch_f32(x.rows(), self.stats());
        let mut out = cx.scratch(x.rows(), x.cols());
        self.forward_into(cx, x.view(), out.view_mut(), stats.view_mut());
        (out, stats)
    }

    fn forward_into(&self, cx: &Ctx<'_>, x: View<'_>, out: ViewMut<'_>, stats: ViewMut<'_>) {
        cx.device.norm(self.params(cx), x, self.eps, out, stats);
    }

    /// The output of the forward pass, saved or recomputed from the statistics.
    pub fn output(&self, cx: &Ctx<'_>, x: &Tensor, saved: &mut SavedNorm) -> Tensor {
        saved.out.take().unwrap_or_else(|| {
            let mut out = cx.scratch(x.rows(), x.cols());
            let (x, stats) = (x.view(), saved.stats.view());
            cx.device.norm_recompute(self.params(cx), x, stats, out.view_mut());
            out
        })
    }

    pub fn backward(&self, cx: &Ctx<'_>, of: NormBackward<'_>, grads: &mut WeightGrads<'_>) {
        let NormBackward { x, stats, dy, dx, bias_before } = of;
        let inputs = [x.view(), cx.weights.part(self.gain.clone()), stats.view()];
        let (dim, mut range) = (self.gain.len(), self.gain.clone());
        if let Some(bias) = &self.bias {
            assert_eq!(range.end, bias.start, "gain and bias are adjacent");
            range.end = bias.end;
        }
        if let Some(before) = &bias_before {
            assert_eq!(before.end, range.start, "the bias before is adjacent");
            range.start = before.start;
        }
        grads.in_f32(range, |place, accumulate| {
            let (sums, place) = place.split_at(bias_before.map_or(0, |before| before.len()));
            let (gain, bias) = place.split_at(dim);
            let bias = self.bias.is_some().then_some(bias);
            let gradients = NormGradients { gain, bias, accumulate };
            match sums.len() {
                0 => cx.device.norm_backward(inputs, dy, dx, gradients),
                _ => cx.device.norm_backward_and_sum(inputs, dy, dx, gradients, sums),
            }
        });
    }

    fn params<'a>(&self, cx: &Ctx<'a>) -> NormParams<'a> {
        let gain = cx.weights.part(self.gain.clone());
        match &self.bias {
            Some(bias) => NormParams::Layer { gain, bias: cx.weights.part(bias.clone()) },
            None => NormParams::Rms { gain },
        }
    }
}
