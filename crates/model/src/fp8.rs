//! Linear layers with fp8 operands: activations and weights in e4m3, gradients in e5m2, products in f32. The weights
//! that the optimizer updates, norms, attention and the residual stream are as without fp8.

use lockstep_kernels::{
    Fp8Cast, Fp8Copies, Fp8Format, Fp8History, Fp8Source, Fp8Tensor, Matmul, Tag, Tensor, View,
    ViewMut,
};

use crate::linear::Linear;
use crate::{Ctx, WeightGrads};

/// Which matrices are multiplied in fp8, and their scales.
#[derive(Clone, Copy)]
pub struct Fp8<'a> {
    /// Also the output projection. Linear layers of attention and dense feed-forwards always are.
    pub head: bool,
    /// Scales of earlier steps. Without them, a matrix has the scale of its own largest element.
    pub history: Option<&'a Fp8History>,
}

/// Operands of a layer's multiplies.
#[derive(Clone, Copy)]
pub(crate) enum Fp8Operand {
    Input,
    Weight,
    Gradient,
}

impl Fp8Operand {
    pub fn format(self) -> Fp8Format {
        match self {
            Fp8Operand::Input | Fp8Operand::Weight => Fp8Format::E4m3,
            Fp8Operand::Gradient => Fp8Format::E5m2,
        }
    }
}

impl Fp8<'_> {
    /// Matrices of a model with this many blocks: four layers with three operands each.
    pub fn most_matrices(blocks: usize) -> usize {
        12 * blocks
    }
}

impl<'a> Ctx<'a> {
    /// Copies of a layer's input that the forward pass makes.
    pub(crate) fn fp8_copies(&self) -> Fp8Copies {
        if self.saves_fp8() { Fp8Copies::Both } else { Fp8Copies::Plain }
    }

    /// Saves the transposed copy of a layer's input, if it is not computed again.
    pub(crate) fn save_fp8(&self, input: Fp8Tensor) -> Option<Fp8Tensor> {
        self.saves_fp8().then(|| input.transposed_only())
    }

    /// Where the scale of a layer's operand comes from. `weight` is the layer's place in the parameters of the block.
    pub(crate) fn fp8_history(
        &self,
        block: usize,
        weight: usize,
        operand: Fp8Operand,
    ) -> Option<(&'a Fp8History, u64)> {
        let key = (block as u64) << 40 | (weight as u64) << 2 | operand as u64;
        Some((self.fp8?.history?, key))
    }
}

impl Linear {
    /// Casts the input. The transposed copy is for the weight gradient: saved by the forward pass if it makes both.
    pub fn fp8_input(&self, cx: &Ctx<'_>, from: Fp8Source<'_>, copies: Fp8Copies) -> Fp8Tensor {
        let tag = if copies == Fp8Copies::Both { Tag::Activations } else { Tag::Buffers };
        self.fp8_cast(cx, Fp8Operand::Input, from, copies, tag, None)
    }

    fn fp8_weight(&self, cx: &Ctx<'_>, copies: Fp8Copies) -> Fp8Tensor {
        let from = Fp8Source::Whole(self.weight(cx));
        self.fp8_cast(cx, Fp8Operand::Weight, from, copies, Tag::Buffers, None)
    }

    fn fp8_cast(
        &self,
        cx: &Ctx<'_>,
        operand: Fp8Operand,
        from: Fp8Source<'_>,
        copies: Fp8Copies,
        tag: Tag,
        column_sums: Option<(ViewMut<'_>, bool)>,
    ) -> Fp8Tensor {
        let format = operand.format();
        let history = cx.fp8_history(self.block(), self.weight_range().start, operand);
        cx.device.fp8_cast(Fp8Cast { from, format, copies, tag, column_sums, history })
    }

    /// The layer with its bias, plus a residual.
    pub fn fp8_forward(
        &self,
        cx: &Ctx<'_>,
        x: &Fp8Tensor,
        residual: Option<View<'_>>,
        out: ViewMut<'_>,
    ) {
        let weight = self.fp8_weight(cx, Fp8Copies::Plain);
        let bias = self.bias(cx);
        cx.device.matmul(Matmul { bias, residual, ..Matmul::fp8_linear(x, &weight, out) });
    }

    /// The gradients of weight and bias, and that of the input, which is returned. `x` is the transposed input.
    pub fn fp8_backward(
        &self,
        cx: &Ctx<'_>,
        x: Fp8Tensor,
        dy: Fp8Source<'_>,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let dy = self.fp8_gradient(cx, dy, grads);
        grads.fp8_weight(self.weight_range(), &dy, &x);
        drop(x);
        let weight = self.fp8_weight(cx, Fp8Copies::Transposed);
        let mut dx = cx.scratch(cx.tokens(), self.cols());
        cx.device.matmul(Matmul::fp8_linear_dx(&dy, &weight, dx.view_mut()));
        dx
    }

    /// Casts the gradient of the output, and computes that of the bias on the way.
    fn fp8_gradient(
        &self,
        cx: &Ctx<'_>,
        from: Fp8Source<'_>,
        grads: &mut WeightGrads<'_>,
    ) -> Fp8Tensor {
        let cast = |column_sums: Option<(ViewMut<'_>, bool)>| {
            let (operand, copies) = (Fp8Operand::Gradient, Fp8Copies::Both);
            self.fp8_cast(cx, operand, from, copies, Tag::Buffers, column_sums)
        };
        let Some(bias) = self.bias_range() else { return cast(None) };
        let mut dy = None;
        grads.in_f32(bias, |place, accumulate| dy = Some(cast(Some((place, accumulate)))));
        dy.expect("in_f32 calls its function")
    }
}
