//! Normalization: LayerNorm if the block has a bias for it, RMSNorm otherwise.

use std::ops::Range;

use lockstep_kernels::{Tensor, View, ViewMut};
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
        let gain = cx.weights.part(self.gain.clone());
        match &self.bias {
            Some(bias) => {
                let bias = cx.weights.part(bias.clone());
                cx.device.layer_norm(x, gain, bias, self.eps, out, stats)
            }
            None => cx.device.rms_norm(x, gain, self.eps, out, stats),
        }
    }

    /// The output, recomputed from the saved statistics.
    pub fn recompute(&self, cx: &Ctx<'_>, x: &Tensor, stats: &Tensor) -> Tensor {
        let mut out = cx.scratch(x.rows(), x.cols());
        let gain = cx.weights.part(self.gain.clone());
        let (x, stats) = (x.view(), stats.view());
        match &self.bias {
            Some(bias) => {
                let bias = cx.weights.part(bias.clone());
                cx.device.layer_norm_again(x, gain, bias, stats, out.view_mut())
            }
            None => cx.device.rms_norm_again(x, gain, stats, out.view_mut()),
        }
        out
    }

    pub fn backward(&self, cx: &Ctx<'_>, of: NormBackward<'_>, grads: &mut WeightGrads<'_>) {
        let NormBackward { x, stats, dy, dx } = of;
        let gain = cx.weights.part(self.gain.clone());
        let (x, stats) = (x.view(), stats.view());
        match &self.bias {
            Some(bias) => {
                assert_eq!(self.gain.end, bias.start, "gain and bias are adjacent");
                grads.in_f32(self.gain.start..bias.end, |place, add| {
                    let (dgain, dbias) = place.split_at(self.gain.len());
                    cx.device.layer_norm_backward(x, gain, stats, dy, dx, dgain, dbias, add);
                });
            }
            None => grads.in_f32(self.gain.clone(), |dgain, add| {
                cx.device.rms_norm_backward(x, gain, stats, dy, dx, dgain, add);
            }),
        }
    }
}
