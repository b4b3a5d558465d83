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

/// Operands of the backward pass.
pub(crate) struct NormBackward<'a> {
    pub x: &'a Tensor,
    pub stats: &'a Tensor,
    pub dy: View<'a>,
    /// The gradient of the residual stream, to which that of the input is added.
    pub dx: ViewMut<'a>,
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

    /// Statistics that are saved for each row.
    pub fn stats(&self) -> usize {
        if self.bias.is_some() { 2 } else { 1 }
    }

    pub fn forward(&self, cx: &Ctx<'_>, x: View<'_>, out: ViewMut<'_>, stats: ViewMut<'_>) {
        cx.device.norm(self.params(cx), x, self.eps, out, stats);
    }

    /// The output, recomputed from the saved statistics.
    pub fn recompute(&self, cx: &Ctx<'_>, x: &Tensor, stats: &Tensor) -> Tensor {
        let mut out = cx.scratch(x.rows(), x.cols());
        cx.device.norm_recompute(self.params(cx), x.view(), stats.view(), out.view_mut());
        out
    }

    pub fn backward(&self, cx: &Ctx<'_>, of: NormBackward<'_>, grads: &mut WeightGrads<'_>) {
        let NormBackward { x, stats, dy, dx } = of;
        let inputs = [x.view(), cx.weights.part(self.gain.clone()), stats.view()];
        let range = match &self.bias {
            Some(bias) => {
                assert_eq!(self.gain.end, bias.start, "gain and bias are adjacent");
                self.gain.start..bias.end
            }
            None => self.gain.clone(),
        };
        grads.in_f32(range, |place, accumulate| {
            let (gain, bias) = place.split_at(self.gain.len());
            let bias = self.bias.is_some().then_some(bias);
            cx.device.norm_backward(inputs, dy, dx, NormGradients { gain, bias, accumulate });
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
