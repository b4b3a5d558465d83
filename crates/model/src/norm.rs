//! The norm before each part of a block: LayerNorm where the block has a bias for it, RMSNorm otherwise.

use std::ops::Range;

use lockstep_kernels::{Device, Tensor, View, ViewMut};
use lockstep_plan::model::BlockParams;

use crate::{Ctx, WeightGrads};

pub(crate) struct Norm {
    gain: Range<usize>,
    bias: Option<Range<usize>>,
    eps: f32,
}

impl Norm {
    pub fn new(params: &BlockParams, name: &str, eps: f64) -> Norm {
        let bias = format!("{name}.bias");
        let has_bias = params.params.iter().any(|param| param.name == bias);
        Norm {
            gain: params.range(&format!("{name}.gain")),
            bias: has_bias.then(|| params.range(&bias)),
            eps: eps as f32,
        }
    }

    /// Columns of the statistics that are kept for each row.
    pub fn stats(&self) -> usize {
        if self.bias.is_some() { 2 } else { 1 }
    }

    pub fn forward(
        &self,
        device: &Device,
        weights: View<'_>,
        x: View<'_>,
        out: ViewMut<'_>,
        stats: ViewMut<'_>,
    ) {
        let gain = weights.part(self.gain.clone());
        match &self.bias {
            Some(bias) => {
                device.layer_norm(x, gain, weights.part(bias.clone()), self.eps, out, stats)
            }
            None => device.rms_norm(x, gain, self.eps, out, stats),
        }
    }

    /// The output once more, from what was kept.
    pub fn again(
        &self,
        device: &Device,
        weights: View<'_>,
        x: View<'_>,
        stats: View<'_>,
        out: ViewMut<'_>,
    ) {
        let gain = weights.part(self.gain.clone());
        match &self.bias {
            Some(bias) => device.layer_norm_again(x, gain, weights.part(bias.clone()), stats, out),
            None => device.rms_norm_again(x, gain, stats, out),
        }
    }

    /// Adds the input's gradient to `dx`: the residual stream passes by every norm.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: &Tensor,
        stats: &Tensor,
        dy: View<'_>,
        dx: ViewMut<'_>,
        grads: &mut WeightGrads<'_>,
    ) {
        let gain = weights.part(self.gain.clone());
        let (x, stats) = (x.view(), stats.view());
        match &self.bias {
            Some(bias) => {
                assert_eq!(self.gain.end, bias.start, "the two lie side by side");
                grads.wide(cx.device, self.gain.start..bias.end, |place, add| {
                    let (dgain, dbias) = place.split_at(self.gain.len());
                    cx.device.layer_norm_backward(x, gain, stats, dy, dx, dgain, dbias, add);
                });
            }
            None => grads.wide(cx.device, self.gain.clone(), |dgain, add| {
                cx.device.rms_norm_backward(x, gain, stats, dy, dx, dgain, add);
            }),
        }
    }
}
