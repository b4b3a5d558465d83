//! A linear layer: y = x · Wᵀ + b.

use std::ops::Range;

use lockstep_kernels::{GroupedMatmul, Matmul, RowGroups, Stack, Tag, Tensor, View, ViewMut};
use lockstep_parallel::SequenceGather;
use lockstep_plan::model::BlockParams;

use crate::{Ctx, WeightGrads};

/// A linear layer, by the ranges of its parameters in the block's flat buffer.
pub(crate) struct Linear {
    /// (out, in)
    weight: Range<usize>,
    /// (out)
    bias: Option<Range<usize>>,
    rows: usize,
    cols: usize,
    /// Number of the block.
    block: usize,
}

impl Linear {
    pub fn new(params: &BlockParams, name: &str) -> Linear {
        Linear::fused(params, &[name])
    }

    /// Several layers with the same input as one. Their weights are adjacent in the buffer, and so are their biases.
    pub fn fused(params: &BlockParams, names: &[&str]) -> Linear {
        let span = |suffix: &str| {
            let first = format!("{}.{suffix}", names[0]);
            let last = format!("{}.{suffix}", names[names.len() - 1]);
            params.get(&first).map(|_| params.range(&first).start..params.range(&last).end)
        };
        let weight =
            span("weight").unwrap_or_else(|| panic!("block {} has no {}", params.name, names[0]));
        let cols = params.get(&format!("{}.weight", names[0])).map_or(0, |param| param.dims[1]);
        Linear { rows: weight.len() / cols, cols, weight, bias: span("bias"), block: params.number }
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of the block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn weight_range(&self) -> Range<usize> {
        self.weight.clone()
    }

    pub fn bias_range(&self) -> Option<Range<usize>> {
        self.bias.clone()
    }

    pub fn bias<'a>(&self, cx: &Ctx<'a>) -> Option<View<'a>> {
        self.bias.clone().map(|bias| cx.weights.part(bias))
    }

    pub fn weight<'a>(&self, cx: &Ctx<'a>) -> View<'a> {
        cx.weights.part(self.weight.clone()).shaped(self.rows, self.cols)
    }

    /// The multiply, to which the caller may add an epilogue.
    pub fn forward<'a>(&self, cx: &Ctx<'a>, x: View<'a>, out: ViewMut<'a>) -> Matmul<'a> {
        Matmul { bias: self.bias(cx), ..Matmul::linear(x, self.weight(cx), out) }
    }

    pub fn input_gradient(&self, cx: &Ctx<'_>, dy: View<'_>, dx: ViewMut<'_>) {
        cx.device.matmul(Matmul::linear_dx(dy, self.weight(cx), dx));
    }

    /// The gradient of the input of a GELU, whose output is the input of this layer.
    pub fn gelu_input_gradient(
        &self,
        cx: &Ctx<'_>,
        dy: View<'_>,
        before: View<'_>,
        dbefore: ViewMut<'_>,
    ) {
        let product = Matmul::linear_dx(dy, self.weight(cx), dbefore);
        cx.device.matmul(Matmul { gelu_backward: Some(before), ..product });
    }

    pub fn weight_gradient(&self, dy: &Tensor, x: &Tensor, grads: &mut WeightGrads<'_>) {
        grads.weight(self.weight.clone(), dy, x);
        if let Some(bias) = &self.bias {
            grads.bias(bias.clone(), dy);
        }
    }

    /// The whole backward pass of a layer whose input is gathered along the tensor axis. Returns the gradient of this
    /// rank's rows of the stream. If the input is still in transit, its gradient is computed first; otherwise the
    /// weight gradient is, so that the input can be freed.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        x: SequenceGather<'_>,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let mut weight_gradient =
            |x: SequenceGather<'_>| self.weight_gradient(&dy, &x.wait(), grads);
        let mut waiting = Some(x);
        if let Some(x) = waiting.take_if(|x| !x.in_flight()) {
            weight_gradient(x);
        }
        let dx = cx.groups.reduce_output_with(
            cx.device,
            cx.partial_output(self.cols, Tag::Buffers),
            |rows, dx| {
                self.input_gradient(cx, dy.view().rows_of(rows), dx);
            },
        );
        if let Some(x) = waiting {
            weight_gradient(x);
        }
        dx
    }
}

/// One linear layer of every expert, without biases. Each is applied to its group of rows.
pub(crate) struct LinearStack(Stack);

impl LinearStack {
    /// # Panics
    /// If the layers differ in shape or have biases, or their weights are not at equal distances.
    pub fn new(layers: &[Linear]) -> LinearStack {
        let first = layers.first().expect("a rank has at least one expert");
        let start = |linear: &Linear| linear.weight.start;
        let stride = layers.get(1).map_or(first.weight.len(), |next| start(next) - start(first));
        let (rows, cols) = (first.rows, first.cols);
        let stack = Stack { first: start(first), stride, count: layers.len(), rows, cols };
        for (index, layer) in layers.iter().enumerate() {
            assert_eq!((layer.weight.clone(), layer.cols), (stack.range(index), cols), "experts");
            assert!(layer.bias.is_none(), "experts have no biases");
        }
        LinearStack(stack)
    }

    pub fn forward(&self, cx: &Ctx<'_>, groups: &RowGroups, x: &Tensor, out: &mut Tensor) {
        let (weights, x) = ((cx.weights, self.0), x.view());
        cx.device.grouped_matmul(GroupedMatmul::linear(groups, weights, x, out.view_mut()));
    }

    pub fn input_gradient(&self, cx: &Ctx<'_>, groups: &RowGroups, dy: &Tensor, dx: &mut Tensor) {
        let (weights, dy) = ((cx.weights, self.0), dy.view());
        cx.device.grouped_matmul(GroupedMatmul::linear_dx(groups, weights, dy, dx.view_mut()));
    }

    pub fn weight_gradient(
        &self,
        groups: &RowGroups,
        dy: &Tensor,
        x: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) {
        grads.weight_stack(groups, self.0, dy, x);
    }
}
