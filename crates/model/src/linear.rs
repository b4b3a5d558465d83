//! A linear layer: y = x · Wᵀ + b.

use std::ops::Range;

use lockstep_kernels::{Device, Matmul, Tag, Tensor, View, ViewMut};
use lockstep_parallel::Entering;
use lockstep_plan::model::BlockParams;

use crate::{Ctx, WeightGrads};

/// Where a linear layer's parameters lie in its block's flat buffer.
pub(crate) struct Linear {
    /// (out, in)
    weight: Range<usize>,
    /// (out)
    bias: Option<Range<usize>>,
    rows: usize,
    cols: usize,
}

impl Linear {
    /// The layers of these names as one: their weights follow each other in the buffer, and so do their
    /// biases, if they have any.
    pub fn joined(params: &BlockParams, names: &[&str]) -> Linear {
        let find = |name: &str| params.params.iter().find(|param| param.name == name);
        let span = |suffix: &str| {
            let first = format!("{}.{suffix}", names[0]);
            let last = format!("{}.{suffix}", names[names.len() - 1]);
            find(&first).map(|_| params.range(&first).start..params.range(&last).end)
        };
        let weight =
            span("weight").unwrap_or_else(|| panic!("block {} has no {}", params.name, names[0]));
        let cols = find(&format!("{}.weight", names[0])).map_or(0, |param| param.dims[1]);
        Linear { rows: weight.len() / cols, cols, weight, bias: span("bias") }
    }

    pub fn new(params: &BlockParams, name: &str) -> Linear {
        Linear::joined(params, &[name])
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn weight<'a>(&self, weights: View<'a>) -> View<'a> {
        weights.part(self.weight.clone()).shaped(self.rows, self.cols)
    }

    /// The multiply, for the caller to add what happens on the way out.
    pub fn forward<'a>(&self, weights: View<'a>, x: View<'a>, out: ViewMut<'a>) -> Matmul<'a> {
        let bias = self.bias.clone().map(|bias| weights.part(bias));
        Matmul { bias, ..Matmul::linear(x, self.weight(weights), out) }
    }

    pub fn input_gradient(
        &self,
        device: &Device,
        weights: View<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
    ) {
        device.matmul(Matmul::linear_dx(dy, self.weight(weights), dx));
    }

    pub fn weight_gradient(
        &self,
        device: &Device,
        dy: &Tensor,
        x: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) {
        grads.weight(device, self.weight.clone(), dy, x);
        if let Some(bias) = &self.bias {
            grads.bias(device, bias.clone(), dy);
        }
    }

    /// All of the backward pass, of a layer whose input has entered the tensor axis: the gradient of the stream's
    /// rows of this rank. The gradient of the weights waits for the input where that is on its way, and otherwise
    /// comes first, so that its input can go.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: Entering<'_>,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let mut weight_gradient = |x: Entering<'_>| {
            self.weight_gradient(cx.device, &dy, &x.all(), grads);
        };
        let mut waiting = Some(x);
        if let Some(x) = waiting.take_if(|x| !x.travels()) {
            weight_gradient(x);
        }
        let dx =
            cx.groups.leave_with(cx.device, cx.leaving(self.cols, Tag::Buffers), |rows, dx| {
                self.input_gradient(cx.device, weights, dy.view().rows_of(rows), dx);
            });
        if let Some(x) = waiting {
            weight_gradient(x);
        }
        dx
    }

    /// The same of some rows only: an expert's.
    pub fn weight_gradient_of(
        &self,
        device: &Device,
        dy: &Tensor,
        x: &Tensor,
        rows: Range<usize>,
        grads: &mut WeightGrads<'_>,
    ) {
        assert!(self.bias.is_none(), "experts have no biases");
        grads.weight_of(device, self.weight.clone(), dy, x, rows);
    }
}
