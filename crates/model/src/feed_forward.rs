//! The second half of a layer: x + down(act(up(norm(x)))), with GELU or SwiGLU, or a mixture of experts.

use std::ops::Range;

use lockstep_kernels::{Matmul, Tensor, View};
use lockstep_parallel::Entering;
use lockstep_plan::model::{BlockParams, Family, Shape};

use crate::linear::Linear;
use crate::moe::{Active, Experts, ExpertsSaved};
use crate::norm::Norm;
use crate::stream::{add_projection, projection_gradient};
use crate::{Ctx, WeightGrads};

pub(crate) struct FeedForward {
    pub norm: Norm,
    pub inner: Inner,
    site: u64,
}

pub(crate) enum Inner {
    Dense(Dense),
    Experts(Experts),
}

pub(crate) struct Dense {
    activation: Activation,
    up: Linear,
    pub down: Linear,
}

#[derive(Clone, Copy, PartialEq)]
enum Activation {
    Gelu,
    /// The projection gives gate and up side by side.
    Swiglu,
}

/// What the backward pass needs beside the input.
pub(crate) struct FeedForwardSaved {
    stats: Tensor, // (tokens, 1 or 2), f32
    inner: InnerSaved,
}

// Not boxed: a step in the steady state allocates nothing.
#[allow(clippy::large_enum_variant)]
enum InnerSaved {
    Dense(Option<Tensor>), // (tokens, ffn or 2 ffn), before the activation; none when it is computed again
    Experts(ExpertsSaved),
}

/// The wide part after its activation.
pub(crate) enum After {
    Dense(Tensor), // (tokens, ffn)
    Experts(Active),
}

impl FeedForward {
    pub fn new(shape: &Shape, params: &BlockParams, site: u64) -> FeedForward {
        let inner = match (shape.family, shape.moe) {
            (Family::Moe, Some(moe)) => Inner::Experts(Experts::new(shape, moe, params)),
            (Family::Gpt2, _) => Inner::Dense(Dense {
                activation: Activation::Gelu,
                up: Linear::new(params, "mlp.up"),
                down: Linear::new(params, "mlp.down"),
            }),
            _ => Inner::Dense(Dense::swiglu(params, "mlp")),
        };
        FeedForward { norm: Norm::new(params, "norm2", shape.norm_eps), inner, site }
    }

    /// `keep_inner` is false when the backward pass shall compute the wide part again.
    pub fn forward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: &Tensor,
        keep_inner: bool,
    ) -> (Tensor, FeedForwardSaved) {
        let (after, saved) = self.inside(cx, weights, x, keep_inner);
        let y = match (&self.inner, &after, &saved.inner) {
            (Inner::Dense(dense), After::Dense(after), _) => {
                add_projection(cx, self.site, &dense.down, weights, after.view(), x)
            }
            (Inner::Experts(experts), After::Experts(after), InnerSaved::Experts(saved)) => {
                experts.project(cx, weights, after, saved, x)
            }
            _ => unreachable!("a half is saved in its own form"),
        };
        (y, saved)
    }

    /// Up to the last projection: the activation, and what a backward pass needs.
    pub fn inside(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: &Tensor,
        keep_inner: bool,
    ) -> (After, FeedForwardSaved) {
        let mut stats = cx.kept_wide(x.rows(), self.norm.stats());
        let mut normed = cx.scratch(x.rows(), x.cols());
        self.norm.forward(cx.device, weights, x.view(), normed.view_mut(), stats.view_mut());
        let (after, inner) = match &self.inner {
            Inner::Dense(dense) => {
                let normed = cx.groups.start_enter(cx.device, normed);
                let (after, before) = dense.inside(cx, weights, normed, keep_inner);
                (After::Dense(after), InnerSaved::Dense(before))
            }
            Inner::Experts(experts) => {
                let normed = cx.groups.enter(cx.device, normed);
                let (after, saved) = experts.inside(cx, weights, &normed, keep_inner);
                (After::Experts(after), InnerSaved::Experts(saved))
            }
        };
        (after, FeedForwardSaved { stats, inner })
    }

    /// From the gradient of the stream after this half to the one before it.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: &Tensor,
        saved: FeedForwardSaved,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let FeedForwardSaved { stats, inner } = saved;
        let normed = || {
            let mut normed = cx.scratch(x.rows(), x.cols());
            self.norm.again(cx.device, weights, x.view(), stats.view(), normed.view_mut());
            normed
        };
        let dnormed = match (&self.inner, inner) {
            (Inner::Dense(dense), InnerSaved::Dense(before)) => {
                let dprojected = projection_gradient(cx, self.site, &dy);
                let normed = || cx.groups.start_enter(cx.device, normed());
                let dbefore = dense.backward(cx, weights, &normed, before, dprojected, grads);
                dense.up.backward(cx, weights, normed(), dbefore, grads)
            }
            (Inner::Experts(experts), InnerSaved::Experts(saved)) => {
                let dprojected = cx.groups.leave_backward(cx.device, dy.clone());
                let normed = cx.groups.enter(cx.device, normed());
                let dnormed = experts.backward(cx, weights, &normed, saved, &dprojected, grads);
                cx.groups.enter_backward(cx.device, dnormed)
            }
            _ => unreachable!("a half is saved in its own form"),
        };
        let mut dx = cx.own(dy);
        self.norm.backward(cx, weights, x, &stats, dnormed.view(), dx.view_mut(), grads);
        dx
    }
}

impl Dense {
    pub fn swiglu(params: &BlockParams, name: &str) -> Dense {
        Dense {
            activation: Activation::Swiglu,
            up: Linear::joined(params, &[&format!("{name}.gate"), &format!("{name}.up")]),
            down: Linear::new(params, &format!("{name}.down")),
        }
    }

    /// The activation, and what was before it where that is kept.
    pub fn inside(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: Entering<'_>,
        keep: bool,
    ) -> (Tensor, Option<Tensor>) {
        let (tokens, width) = (cx.tokens(), self.up.rows());
        let mut before = if keep { cx.kept(tokens, width) } else { cx.scratch(tokens, width) };
        let after = self.activated(cx, weights, normed, &mut before);
        (after, keep.then_some(before))
    }

    /// Columns after the activation.
    fn width(&self) -> usize {
        match self.activation {
            Activation::Gelu => self.up.rows(),
            Activation::Swiglu => self.up.rows() / 2,
        }
    }

    /// The activation of the first projection, whose result goes to `before`.
    fn activated(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: Entering<'_>,
        before: &mut Tensor,
    ) -> Tensor {
        let mut after = cx.scratch(cx.tokens(), self.width());
        match self.activation {
            // Both in one go, while the product is still in registers.
            Activation::Gelu => normed.each(|rows, normed| {
                let to = after.view_mut().rows_of(rows.clone());
                let up = self.up.forward(weights, normed, to);
                let before = before.view_mut().rows_of(rows);
                cx.device.matmul(Matmul { gelu: Some(before), ..up });
            }),
            Activation::Swiglu => {
                self.project(cx, weights, normed, before);
                cx.device.swiglu(before.view(), after.view_mut());
            }
        }
        after
    }

    /// The first projection alone.
    fn project(&self, cx: &Ctx<'_>, weights: View<'_>, normed: Entering<'_>, before: &mut Tensor) {
        normed.each(|rows, normed| {
            let to = before.view_mut().rows_of(rows);
            cx.device.matmul(self.up.forward(weights, normed, to));
        });
    }

    /// The gradient of what the first projection gave, from that of the second's; `normed` makes the input again.
    fn backward<'p>(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: &impl Fn() -> Entering<'p>,
        before: Option<Tensor>,
        dy: Entering<'_>,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let device = cx.device;
        // What was before the activation, and the activation once more for the second projection's weight.
        let before = before.unwrap_or_else(|| {
            let mut before = cx.scratch(cx.tokens(), self.up.rows());
            self.project(cx, weights, normed(), &mut before);
            before
        });
        let mut after = cx.scratch(cx.tokens(), self.width());
        match self.activation {
            Activation::Gelu => device.gelu(before.view(), after.view_mut()),
            Activation::Swiglu => device.swiglu(before.view(), after.view_mut()),
        }
        let input_gradient = |dafter: &mut Tensor, rows: Range<usize>, dy: View<'_>| {
            let dafter = dafter.view_mut().rows_of(rows);
            self.down.input_gradient(device, weights, dy, dafter);
        };
        let mut dafter = None;
        let dy = match dy.travels() {
            // What comes is multiplied at once; otherwise the activation goes before its gradient comes.
            true => {
                let dafter = dafter.insert(cx.scratch(cx.tokens(), self.width()));
                dy.each_of_all(|rows, dy| input_gradient(dafter, rows, dy))
            }
            false => dy.all(),
        };
        self.down.weight_gradient(device, &dy, &after, grads);
        drop(after);
        let mut dafter = dafter.unwrap_or_else(|| {
            let mut dafter = cx.scratch(cx.tokens(), self.width());
            input_gradient(&mut dafter, 0..cx.tokens(), dy.view());
            dafter
        });
        match self.activation {
            Activation::Gelu => {
                device.gelu_backward(before.view(), dafter.view_mut());
                dafter
            }
            Activation::Swiglu => {
                let mut dbefore = cx.scratch(cx.tokens(), self.up.rows());
                device.swiglu_backward(before.view(), dafter.view(), dbefore.view_mut());
                dbefore
            }
        }
    }

    /// All of the backward pass where all tokens are here: an expert's that is shared. Its ranks' parts of the
    /// input's gradient stay parts.
    pub fn backward_here(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        before: Option<Tensor>,
        dy: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let here = |x: &Tensor| cx.groups.entered(cx.device, x.clone());
        let dbefore = self.backward(cx, weights, &|| here(normed), before, here(dy), grads);
        self.up.weight_gradient(cx.device, &dbefore, normed, grads);
        let mut dnormed = cx.scratch(cx.tokens(), dy.cols());
        self.up.input_gradient(cx.device, weights, dbefore.view(), dnormed.view_mut());
        dnormed
    }
}
