//! Linear layers with fp8 operands: activations and weights in e4m3, gradients in e5m2, products in f32. The weights
//! that the optimizer updates, norms, attention and the residual stream are as without fp8.

use lockstep_kernels::{
    Fp8Cast, Fp8Copies, Fp8Format, Fp8Source, Fp8Tensor, Matmul, Tag, Tensor, View, ViewMut,
};

use crate::linear::Linear;
use crate::{Ctx, WeightGrads};

/// Which matrices are multiplied in fp8.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fp8 {
    /// Also the output projection. Linear layers of attention and dense feed-forwards always are.
    pub head: bool,
}

impl Ctx<'_> {
    /// Casts the input of a linear layer. The transposed copy is for the weight gradient: saved by the forward pass if
    /// it makes both.
    pub(crate) fn fp8_input(&self, from: Fp8Source<'_>, copies: Fp8Copies) -> Fp8Tensor {
        let format = Fp8Format::E4m3;
        let saved = copies == Fp8Copies::Both;
        let tag = if saved { Tag::Activations } else { Tag::Buffers };
        self.device.fp8_cast(Fp8Cast { from, format, copies, tag, column_sums: None })
    }

    /// Copies of a layer's input that the forward pass needs, if it saves one for the backward pass.
    pub(crate) fn fp8_input_copies(&self) -> Fp8Copies {
        if self.saves_fp8() { Fp8Copies::Both } else { Fp8Copies::Plain }
    }

    /// Saves the transposed copy of a layer's input, if it is not computed again.
    pub(crate) fn save_fp8(&self, input: Fp8Tensor) -> Option<Fp8Tensor> {
        self.saves_fp8().then(|| input.transposed_only())
    }
}

impl Linear {
    fn fp8_weight(&self, cx: &Ctx<'_>, copies: Fp8Copies) -> Fp8Tensor {
        let (from, format) = (Fp8Source::Whole(self.weight(cx)), Fp8Format::E4m3);
        cx.device.fp8_cast(Fp8Cast { from, format, copies, tag: Tag::Buffers, column_sums: None })
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

    /// The gradients of weight and bias, and that of the input into `dx`. `x` is the transposed input.
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
            let (format, copies, tag) = (Fp8Format::E5m2, Fp8Copies::Both, Tag::Buffers);
            cx.device.fp8_cast(Fp8Cast { from, format, copies, tag, column_sums })
        };
        let Some(bias) = self.bias_range() else { return cast(None) };
        let mut dy = None;
        grads.in_f32(bias, |place, accumulate| dy = Some(cast(Some((place, accumulate)))));
        dy.expect("in_f32 calls its function")
    }
}
