//! A mixture of experts in the Mixtral form: a router sends each token to its `top_k` likeliest experts, each
//! a SwiGLU of its own, and their outputs are summed with the router's weights. Beside them there may be
//! shared experts, a SwiGLU that every token passes (DeepSeekMoE).
//!
//! Tokens are copied into one matrix in which each expert's lie side by side: *places*. Those of experts
//! elsewhere go there, and what came from everywhere for the experts here is again one matrix, expert by
//! expert. An expert works on its rows of that.
//!
//! ```text
//! forward   tokens ─ gather ─▶ places ─ to_experts ─▶ rows ─ SwiGLU ─▶ rows ─ from_experts ─▶ places ─ combine ─▶ tokens
//! backward  the same from right to left. What comes back beside the rows is, for each, the gradient of its
//!           weight: only there are both sides of the last projection known.
//! ```

mod auxiliary;
mod route;
#[cfg(test)]
mod tests;

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Matmul, Router, Tag, Tensor, View};
use lockstep_parallel::Dispatch;
use lockstep_plan::model::{BlockParams, Moe, Shape};

use crate::feed_forward::Dense;
use crate::linear::Linear;
use crate::{Ctx, WeightGrads};

pub use auxiliary::Auxiliary;
use route::{Gate, Routed};

pub(crate) struct Experts {
    gate: Gate,
    /// Those that are here.
    experts: Vec<Expert>,
    shared: Option<Dense>,
    width: usize,
}

struct Expert {
    gate_up: Linear,
    down: Linear,
}

/// What the backward pass needs beside the input.
pub(crate) struct ExpertsSaved {
    routed: Routed,
    dispatch: Dispatch,
    input: Option<Tensor>,   // (rows, dim), when they came from elsewhere
    gate_up: Option<Tensor>, // (rows, 2 ffn); none when it is computed again
    shared: Option<Tensor>,  // (tokens, 2 shared ffn), likewise
}

/// The wide part after its activation.
pub(crate) struct Active {
    routed: Tensor,         // (rows, ffn)
    shared: Option<Tensor>, // (tokens, shared ffn)
}

/// What experts made of their rows.
struct Inner {
    input: Option<Tensor>, // (rows, dim), when they came from elsewhere
    gate_up: Tensor,       // (rows, 2 ffn)
    after: Tensor,         // (rows, ffn)
}

impl Experts {
    /// Of a rank's piece of a model: with the experts whose parameters are there.
    pub fn new(shape: &Shape, moe: Moe, params: &BlockParams) -> Experts {
        let is_here = |number: &usize| params.params.iter().any(|p| p.expert == Some(*number));
        let expert = |number: usize| {
            let name = |part: &str| format!("experts.{number}.{part}");
            Expert {
                gate_up: Linear::joined(params, &[&name("gate"), &name("up")]),
                down: Linear::new(params, &name("down")),
            }
        };
        Experts {
            gate: Gate::new(shape, moe, params),
            experts: (0..moe.experts).filter(is_here).map(expert).collect(),
            shared: (moe.shared > 0).then(|| Dense::swiglu(params, "shared")),
            width: shape.ffn,
        }
    }

    /// Up to the experts' activation.
    pub fn inside(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        keep_inner: bool,
    ) -> (Active, ExpertsSaved) {
        let routed = self.gate.forward(cx, weights, normed);
        let dispatch = cx.groups.dispatch(cx.device, &routed.starts, routed.places);
        let inner = self.activated(cx, weights, normed, &routed, &dispatch, keep_inner);
        let shared = self.shared.as_ref();
        let entered = || cx.groups.entered(cx.device, normed.clone());
        let (shared, before) = match shared.map(|s| s.inside(cx, weights, entered(), keep_inner)) {
            Some((after, before)) => (Some(after), before),
            None => (None, None),
        };
        let saved = ExpertsSaved {
            routed,
            dispatch,
            input: inner.input.filter(|_| keep_inner),
            gate_up: keep_inner.then_some(inner.gate_up),
            shared: before,
        };
        (Active { routed: inner.after, shared }, saved)
    }

    /// x + the experts' outputs.
    pub fn project(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        after: &Active,
        saved: &ExpertsSaved,
        x: &Tensor,
    ) -> Tensor {
        let (device, groups) = (cx.device, cx.groups);
        let ExpertsSaved { routed, dispatch, .. } = saved;
        let mut rows = device.empty(dispatch.rows, x.cols(), cx.dtype, Tag::Buffers);
        self.each(device, dispatch, |expert, part| {
            let out = rows.view_mut().rows_of(part.clone());
            device.matmul(expert.down.forward(weights, after.routed.view().rows_of(part), out));
        });
        let rows = groups.from_experts(device, dispatch, rows);

        // Each rank of the tensor axis has a part of the sum; one of them adds the stream.
        let mut y = match groups.sequence {
            true => cx.scratch(cx.tokens(), x.cols()),
            false => cx.kept(cx.tokens(), x.cols()),
        };
        let stream = (groups.adds() && !groups.sequence).then(|| x.view());
        match (&self.shared, &after.shared, stream) {
            (Some(shared), Some(after), residual) => {
                let project = shared.down.forward(weights, after.view(), y.view_mut());
                device.matmul(Matmul { residual, ..project });
            }
            (_, _, Some(stream)) => device.copy(stream, y.view_mut()),
            (_, _, None) => device.fill(y.view_mut(), 0.0),
        }
        device.combine(
            rows.view(),
            &self.gate.how,
            routed.place.view(),
            Some(routed.weights.view()),
            y.view_mut(),
            true,
        );
        let mut y = groups.leave(device, y);
        if groups.sequence {
            device.add(y.view_mut(), x.view());
        }
        y
    }

    /// The gradient of the normed input.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        saved: ExpertsSaved,
        dy: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let (device, groups) = (cx.device, cx.groups);
        let ExpertsSaved { routed, dispatch, input, gate_up, shared } = saved;
        let rows = |cols| device.empty(dispatch.rows, cols, cx.dtype, Tag::Buffers);
        let Inner { input, gate_up, mut after } = match gate_up {
            Some(gate_up) => {
                let mut after = rows(self.width);
                device.swiglu(gate_up.view(), after.view_mut());
                Inner { input, gate_up, after }
            }
            None => self.activated(cx, weights, normed, &routed, &dispatch, false),
        };

        // A slot's output is weight · down(after). Its gradient by the weight is what the stream's gradient
        // becomes before the activation, dotted with the activation: no output needs to be kept for it.
        let drows = self.at_experts(cx, &routed, &dispatch, dy);
        let mut dafter = rows(self.width);
        self.each(device, &dispatch, |expert, part| {
            let (dy, dx) = (drows.view().rows_of(part.clone()), dafter.view_mut().rows_of(part));
            expert.down.input_gradient(device, weights, dy, dx);
        });
        let dweights = self.weights_gradient(cx, &routed, &dispatch, &dafter, &after);
        let factors = self.weights_at_experts(cx, &routed, &dispatch);
        device.scale_rows(after.view_mut(), factors.view());
        device.scale_rows(dafter.view_mut(), factors.view());
        self.each(device, &dispatch, |expert, part| {
            expert.down.weight_gradient_of(device, &drows, &after, part, grads);
        });
        drop((drows, after, factors));

        // Through each expert's gate and up, back to the tokens.
        let mut dgate_up = rows(2 * self.width);
        device.swiglu_backward(gate_up.view(), dafter.view(), dgate_up.view_mut());
        drop((gate_up, dafter));
        let input = input.unwrap_or_else(|| self.at_experts(cx, &routed, &dispatch, normed));
        self.each(device, &dispatch, |expert, part| {
            expert.gate_up.weight_gradient_of(device, &dgate_up, &input, part, grads);
        });
        drop(input);
        let mut dinput = rows(normed.cols());
        self.each(device, &dispatch, |expert, part| {
            let (dy, dx) = (dgate_up.view().rows_of(part.clone()), dinput.view_mut().rows_of(part));
            expert.gate_up.input_gradient(device, weights, dy, dx);
        });
        drop(dgate_up);
        let dinput = groups.from_experts(device, &dispatch, dinput);

        // Through the router, and through what is shared.
        let mut dnormed = self.gate.backward(cx, weights, normed, &routed, &dweights, grads);
        let place = routed.place.view();
        device.combine(dinput.view(), &self.gate.how, place, None, dnormed.view_mut(), true);
        drop(dinput);
        if let Some(dense) = &self.shared {
            let more = dense.backward_here(cx, weights, normed, shared, dy, grads);
            device.add(dnormed.view_mut(), more.view());
        }
        dnormed
    }

    /// Gate and up of every row, and the activation.
    fn activated(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        routed: &Routed,
        dispatch: &Dispatch,
        keep: bool,
    ) -> Inner {
        let device = cx.device;
        let tag = if keep { Tag::Activations } else { Tag::Buffers };
        let input = self.at_experts(cx, routed, dispatch, normed);
        let mut gate_up = device.empty(dispatch.rows, 2 * self.width, cx.dtype, tag);
        self.each(device, dispatch, |expert, part| {
            let out = gate_up.view_mut().rows_of(part.clone());
            device.matmul(expert.gate_up.forward(weights, input.view().rows_of(part), out));
        });
        let mut after = device.empty(dispatch.rows, self.width, cx.dtype, Tag::Buffers);
        device.swiglu(gate_up.view(), after.view_mut());
        // What can be gathered again here need not be kept.
        let input = dispatch.travels().then_some(input);
        if let Some(input) = &input {
            input.retag(tag);
        }
        Inner { input, gate_up, after }
    }

    /// The rows of the tokens that come to the experts here.
    fn at_experts(
        &self,
        cx: &Ctx<'_>,
        routed: &Routed,
        dispatch: &Dispatch,
        tokens: &Tensor,
    ) -> Tensor {
        let mut rows = cx.scratch(routed.places, tokens.cols());
        cx.device.gather(tokens.view(), &self.gate.how, routed.order(), rows.view_mut());
        cx.groups.to_experts(cx.device, dispatch, rows)
    }

    /// The weight of each row of the experts here, (rows, 1), f32.
    fn weights_at_experts(&self, cx: &Ctx<'_>, routed: &Routed, dispatch: &Dispatch) -> Tensor {
        let mut places = cx.device.empty(routed.places, 1, Dtype::F32, Tag::Buffers);
        let slots = routed.weights.view().shaped(routed.weights.len(), 1);
        cx.device.gather(slots, &self.one_by_one(), routed.order(), places.view_mut());
        cx.groups.to_experts(cx.device, dispatch, places)
    }

    /// The gradient of each slot's weight, (tokens, top_k), f32.
    fn weights_gradient(
        &self,
        cx: &Ctx<'_>,
        routed: &Routed,
        dispatch: &Dispatch,
        dafter: &Tensor,
        after: &Tensor,
    ) -> Tensor {
        let device = cx.device;
        let mut dots = device.empty(dispatch.rows, 1, Dtype::F32, Tag::Buffers);
        device.row_dots(dafter.view(), after.view(), dots.view_mut());
        let dots = cx.groups.from_experts(device, dispatch, dots);
        let slots = routed.weights.len();
        let mut dweights = device.empty(slots, 1, Dtype::F32, Tag::Buffers);
        let place = routed.place.view();
        device.combine(dots.view(), &self.one_by_one(), place, None, dweights.view_mut(), false);
        cx.groups.sum_over_tensor(&mut dweights);
        dweights.shaped(routed.weights.rows(), routed.weights.cols())
    }

    /// Slots taken for tokens: each in one place.
    fn one_by_one(&self) -> Router {
        Router { top_k: 1, ..self.gate.how }
    }

    /// Calls `work` with each expert here and its rows, also with those that have none: their gradient is
    /// zero, and must be written.
    fn each(
        &self,
        device: &Device,
        dispatch: &Dispatch,
        mut work: impl FnMut(&Expert, Range<usize>),
    ) {
        let mut starts = [0u32; MOST_EXPERTS + 1];
        let starts = &mut starts[..self.experts.len() + 1];
        device.read(dispatch.starts.view(), starts);
        for (expert, bounds) in self.experts.iter().zip(starts.windows(2)) {
            work(expert, bounds[0] as usize..bounds[1] as usize);
        }
    }
}

/// More experts than any published model has in a layer.
const MOST_EXPERTS: usize = 1024;
