//! A dense feed-forward network: down(activation(up(x))), with GELU or SwiGLU.

use std::ops::Range;

use lockstep_kernels::{Fp8Copies, Fp8Source, Fp8Tensor, Matmul, Tensor, View};
use lockstep_parallel::SequenceGather;
use lockstep_plan::model::BlockParams;

use crate::linear::Linear;
use crate::{Ctx, WeightGrads};

pub(crate) struct Dense {
    activation: Activation,
    pub up: Linear,
    pub down: Linear,
}

/// Hidden values that the forward pass saved.
pub(crate) struct SavedHidden {
    pub before: Tensor, // (tokens, ffn or 2 ffn), before the activation
    /// (tokens, ffn), after the activation; none if it is recomputed.
    pub after: Option<Tensor>,
}

/// Hidden values that the forward pass saved in fp8.
pub(crate) struct Fp8Hidden {
    before: Tensor, // (tokens, ffn or 2 ffn), before the activation, in the compute type
    /// The inputs of `up` and of `down`; none if they are recomputed.
    inputs: Option<[Fp8Tensor; 2]>,
}

#[derive(Clone, Copy, PartialEq)]
enum Activation {
    Gelu,
    /// `up` computes gate and up, next to each other.
    Swiglu,
}

impl Dense {
    pub fn gelu(params: &BlockParams, name: &str) -> Dense {
        Dense {
            activation: Activation::Gelu,
            up: Linear::new(params, &format!("{name}.up")),
            down: Linear::new(params, &format!("{name}.down")),
        }
    }

    pub fn swiglu(params: &BlockParams, name: &str) -> Dense {
        Dense {
            activation: Activation::Swiglu,
            up: Linear::fused(params, &[&format!("{name}.gate"), &format!("{name}.up")]),
            down: Linear::new(params, &format!("{name}.down")),
        }
    }

    /// Columns after the activation.
    fn width(&self) -> usize {
        match self.activation {
            Activation::Gelu => self.up.rows(),
            Activation::Swiglu => self.up.rows() / 2,
        }
    }

    /// The hidden values after the activation (tokens, width), and if `save`, what the backward pass needs of them.
    pub fn hidden(
        &self,
        cx: &Ctx<'_>,
        x: SequenceGather<'_>,
        save: bool,
    ) -> (Tensor, Option<SavedHidden>) {
        let (tokens, cols) = (cx.tokens(), self.up.rows());
        let keeps = save && cx.keeps_cheap();
        let mut before = if save { cx.saved(tokens, cols) } else { cx.scratch(tokens, cols) };
        let mut hidden =
            if keeps { cx.saved(tokens, self.width()) } else { cx.scratch(tokens, self.width()) };
        match self.activation {
            // The multiply applies GELU in its epilogue.
            Activation::Gelu => x.for_each(|rows, x| {
                let up = self.up.forward(cx, x, hidden.view_mut().rows_of(rows.clone()));
                let before = before.view_mut().rows_of(rows);
                cx.device.matmul(Matmul { gelu: Some(before), ..up });
            }),
            Activation::Swiglu => {
                self.project_up(cx, x, &mut before);
                cx.device.swiglu(before.view(), hidden.view_mut());
            }
        }
        let after = keeps.then(|| hidden.clone());
        (hidden, save.then_some(SavedHidden { before, after }))
    }

    /// As `hidden`, in fp8: the activation function is part of the cast.
    pub fn fp8_hidden(
        &self,
        cx: &Ctx<'_>,
        x: &Tensor,
        save: bool,
    ) -> (Fp8Tensor, Option<Fp8Hidden>) {
        let (tokens, cols) = (cx.tokens(), self.up.rows());
        let input = self.up.fp8_input(cx, Fp8Source::Whole(x.view()), cx.fp8_copies());
        let mut before = if save { cx.saved(tokens, cols) } else { cx.scratch(tokens, cols) };
        self.up.fp8_forward(cx, &input, None, before.view_mut());
        let hidden = self.down.fp8_input(cx, self.activated(&before), cx.fp8_copies());
        let saved = save.then(|| {
            let inputs = cx.save_fp8(input).zip(cx.save_fp8(hidden.clone()));
            Fp8Hidden { before, inputs: inputs.map(|(up, down)| [up, down]) }
        });
        (hidden, saved)
    }

    /// The values before the activation, recomputed from the input.
    pub fn fp8_recompute(&self, cx: &Ctx<'_>, x: &Tensor) -> Fp8Hidden {
        let input = self.up.fp8_input(cx, Fp8Source::Whole(x.view()), Fp8Copies::Plain);
        let mut before = cx.scratch(cx.tokens(), self.up.rows());
        self.up.fp8_forward(cx, &input, None, before.view_mut());
        Fp8Hidden { before, inputs: None }
    }

    /// The gradient of the input `x` from that of the output. `x` is called if the forward pass saved no copy of it.
    pub fn fp8_backward(
        &self,
        cx: &Ctx<'_>,
        saved: Fp8Hidden,
        x: impl FnOnce() -> Tensor,
        dy: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let Fp8Hidden { before, inputs } = saved;
        let [input, hidden] = inputs.map_or([None, None], |inputs| inputs.map(Some));
        let hidden = hidden.unwrap_or_else(|| {
            self.down.fp8_input(cx, self.activated(&before), Fp8Copies::Transposed)
        });
        let dhidden = self.down.fp8_backward(cx, hidden, Fp8Source::Whole(dy.view()), grads);
        let input = input.unwrap_or_else(|| {
            self.up.fp8_input(cx, Fp8Source::Whole(x().view()), Fp8Copies::Transposed)
        });
        match self.activation {
            Activation::Gelu => {
                let dbefore = Fp8Source::GeluGradient { x: before.view(), d: dhidden.view() };
                self.up.fp8_backward(cx, input, dbefore, grads)
            }
            Activation::Swiglu => {
                let mut dbefore = cx.scratch(cx.tokens(), self.up.rows());
                cx.device.swiglu_backward(before.view(), dhidden.view(), dbefore.view_mut());
                drop((before, dhidden));
                self.up.fp8_backward(cx, input, Fp8Source::Whole(dbefore.view()), grads)
            }
        }
    }

    fn activated<'a>(&self, before: &'a Tensor) -> Fp8Source<'a> {
        match self.activation {
            Activation::Gelu => Fp8Source::Gelu(before.view()),
            Activation::Swiglu => Fp8Source::Swiglu(before.view()),
        }
    }

    /// The values before the activation, recomputed.
    pub fn recompute(&self, cx: &Ctx<'_>, x: SequenceGather<'_>) -> SavedHidden {
        let mut before = cx.scratch(cx.tokens(), self.up.rows());
        self.project_up(cx, x, &mut before);
        SavedHidden { before, after: None }
    }

    fn project_up(&self, cx: &Ctx<'_>, x: SequenceGather<'_>, before: &mut Tensor) {
        x.for_each(|rows, x| {
            let to = before.view_mut().rows_of(rows);
            cx.device.matmul(self.up.forward(cx, x, to));
        });
    }

    /// The gradient of the values before the activation, from that of the output.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: SavedHidden,
        dy: SequenceGather<'_>,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let (device, SavedHidden { before, after }) = (cx.device, saved);
        // The weight gradient of `down` needs the hidden values again.
        let hidden = after.unwrap_or_else(|| {
            let mut hidden = cx.scratch(cx.tokens(), self.width());
            match self.activation {
                Activation::Gelu => device.gelu(before.view(), hidden.view_mut()),
                Activation::Swiglu => device.swiglu(before.view(), hidden.view_mut()),
            }
            hidden
        });
        // Of the values before a GELU, or after a SwiGLU.
        let input_gradient = |d: &mut Tensor, rows: Range<usize>, dy: View<'_>| {
            let to = d.view_mut().rows_of(rows.clone());
            match self.activation {
                Activation::Gelu => {
                    self.down.gelu_input_gradient(cx, dy, before.view().rows_of(rows), to)
                }
                Activation::Swiglu => self.down.input_gradient(cx, dy, to),
            }
        };
        let mut gradient = None;
        let dy = match dy.in_flight() {
            // Rows are multiplied as they arrive. Otherwise `hidden` is freed before the gradient is allocated.
            true => {
                let gradient = gradient.insert(cx.scratch(cx.tokens(), self.width()));
                dy.for_each_and_gather(|rows, dy| input_gradient(gradient, rows, dy))
            }
            false => dy.wait(),
        };
        self.down.weight_gradient(&dy, &hidden, grads);
        drop(hidden);
        let gradient = gradient.unwrap_or_else(|| {
            let mut gradient = cx.scratch(cx.tokens(), self.width());
            input_gradient(&mut gradient, 0..cx.tokens(), dy.view());
            gradient
        });
        match self.activation {
            Activation::Gelu => gradient,
            Activation::Swiglu => {
                let mut dbefore = cx.scratch(cx.tokens(), self.up.rows());
                device.swiglu_backward(before.view(), gradient.view(), dbefore.view_mut());
                dbefore
            }
        }
    }
}
