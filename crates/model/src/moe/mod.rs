//! A mixture of experts as in Mixtral: a router sends each token to its `top_k` most probable experts, each a SwiGLU,
//! and their outputs are summed with the router's weights. There may also be shared experts, one SwiGLU that processes
//! every token (DeepSeekMoE).
//!
//! Tokens are copied into one matrix that is ordered by expert; its rows are *places*. Rows of experts on other ranks
//! are sent there, and the rows that arrive for the local experts are again one matrix ordered by expert. Each expert
//! processes its range of rows.
//!
//! ```text
//! forward   tokens ─ gather ─▶ places ─ to_experts ─▶ rows ─ SwiGLU ─▶ rows ─ from_experts ─▶ places ─ combine ─▶ tokens
//! backward  the same from right to left. With the rows comes, for each, the gradient of its weight, because only the
//!           expert's rank has both operands of the last projection.
//! ```

mod auxiliary;
mod backward;
mod loads;
mod route;
#[cfg(test)]
mod tests;

use lockstep_kernels::{Combine, Matmul, Tag, Tensor, View};
use lockstep_parallel::Dispatch;
use lockstep_plan::model::{BlockParams, Moe, Shape};

use crate::Ctx;
use crate::dense::{Dense, SavedHidden};
use crate::linear::{Linear, LinearStack};

pub use auxiliary::Auxiliary;
pub(crate) use backward::ExpertsBackward;
pub use loads::ExpertLoads;
use route::{Gate, Routed};

pub(crate) struct Experts {
    gate: Gate,
    /// The layers of the experts on this rank.
    gate_up: LinearStack,
    down: LinearStack,
    shared: Option<Dense>,
    /// Hidden size of an expert.
    width: usize,
}

/// Activations saved for the backward pass.
pub(crate) struct SavedExperts {
    routing: Routing,
    input: Option<Tensor>,       // (rows, dim), if rows came from other ranks
    gate_up: Option<Tensor>,     // (rows, 2 ffn); none if it is recomputed
    shared: Option<SavedHidden>, // likewise
}

/// The expert of each slot, and the rank of each expert.
struct Routing {
    routed: Routed,
    dispatch: Dispatch,
}

/// The hidden values after the activation.
pub(crate) struct ExpertsHidden {
    routed: Tensor,         // (rows, ffn)
    shared: Option<Tensor>, // (tokens, shared ffn)
}

/// Values inside the experts on this rank.
struct Inner {
    input: Option<Tensor>, // (rows, dim), if rows came from other ranks
    gate_up: Tensor,       // (rows, 2 ffn)
    hidden: Tensor,        // (rows, ffn)
}

impl Experts {
    /// The experts whose parameters are on this rank.
    pub fn new(shape: &Shape, moe: Moe, params: &BlockParams) -> Experts {
        let is_here = |number: &usize| params.params.iter().any(|p| p.expert == Some(*number));
        let name = |number: usize, part: &str| format!("experts.{number}.{part}");
        let gate_up =
            |n: usize| Linear::fused(params, &[name(n, "gate").as_str(), name(n, "up").as_str()]);
        let down = |n: usize| Linear::new(params, &name(n, "down"));
        let here: Vec<usize> = (0..moe.experts).filter(is_here).collect();
        let stack = |linear: &dyn Fn(usize) -> Linear| {
            LinearStack::new(&here.iter().copied().map(linear).collect::<Vec<_>>())
        };
        Experts {
            gate: Gate::new(shape, moe, params),
            gate_up: stack(&gate_up),
            down: stack(&down),
            shared: (moe.shared > 0).then(|| Dense::swiglu(params, "shared")),
            width: shape.ffn,
        }
    }

    /// The forward pass without the last projections.
    pub fn hidden(
        &self,
        cx: &Ctx<'_>,
        normed: &Tensor,
        save: bool,
    ) -> (ExpertsHidden, SavedExperts) {
        let routed = self.gate.forward(cx, normed);
        let dispatch = cx.groups.dispatch(cx.device, &routed.groups, routed.places);
        let routing = Routing { routed, dispatch };
        let Inner { input, gate_up, hidden } = self.inner(cx, normed, &routing, save);
        let gathered = || cx.groups.gathered_sequence(cx.device, normed.clone());
        let (shared, before) = match &self.shared {
            Some(dense) => {
                let (shared, before) = dense.hidden(cx, gathered(), save);
                (Some(shared), before)
            }
            None => (None, None),
        };
        let saved = SavedExperts {
            routing,
            input: input.filter(|_| save),
            gate_up: save.then_some(gate_up),
            shared: before,
        };
        (ExpertsHidden { routed: hidden, shared }, saved)
    }

    /// x + the outputs of the experts.
    pub fn project(
        &self,
        cx: &Ctx<'_>,
        hidden: &ExpertsHidden,
        saved: &SavedExperts,
        x: &Tensor,
    ) -> Tensor {
        let (device, groups) = (cx.device, cx.groups);
        let Routing { routed, dispatch } = &saved.routing;
        let mut rows = cx.scratch(dispatch.rows, x.cols());
        self.down.forward(cx, &dispatch.groups, &hidden.routed, &mut rows);
        let rows = groups.from_experts(device, dispatch, rows);

        // Each rank of the tensor axis has a part of the sum; one of them adds the residual.
        let mut y = match groups.sequence {
            true => cx.scratch(cx.tokens(), x.cols()),
            false => cx.saved(cx.tokens(), x.cols()),
        };
        let residual = (groups.is_tensor_root() && !groups.sequence).then(|| x.view());
        match (&self.shared, &hidden.shared, residual) {
            (Some(shared), Some(hidden), residual) => {
                let project = shared.down.forward(cx, hidden.view(), y.view_mut());
                device.matmul(Matmul { residual, ..project });
            }
            (_, _, Some(residual)) => device.copy(residual, y.view_mut()),
            (_, _, None) => device.fill(y.view_mut(), 0.0),
        }
        let weights = Some(routed.weights.view());
        device.combine(rows.view(), self.slots(routed, weights), y.view_mut(), true);
        let mut y = groups.reduce_output(device, y);
        if groups.sequence {
            device.add(y.view_mut(), x.view());
        }
        y
    }

    /// Gate and up of every row, and the activation.
    fn inner(&self, cx: &Ctx<'_>, normed: &Tensor, routing: &Routing, save: bool) -> Inner {
        let (device, dispatch) = (cx.device, &routing.dispatch);
        let tag = if save { Tag::Activations } else { Tag::Buffers };
        let input = self.rows_at_experts(cx, routing, normed);
        let mut gate_up = device.empty(dispatch.rows, 2 * self.width, cx.dtype, tag);
        self.gate_up.forward(cx, &dispatch.groups, &input, &mut gate_up);
        let mut hidden = cx.scratch(dispatch.rows, self.width);
        device.swiglu(gate_up.view(), hidden.view_mut());
        // Rows of this rank can be gathered again and are not saved.
        let input = dispatch.crosses_ranks().then_some(input);
        if let Some(input) = &input {
            input.retag(tag);
        }
        Inner { input, gate_up, hidden }
    }

    /// The rows of all tokens that go to the experts on this rank.
    fn rows_at_experts(&self, cx: &Ctx<'_>, routing: &Routing, tokens: &Tensor) -> Tensor {
        let Routing { routed, dispatch } = routing;
        let mut rows = cx.scratch(routed.places, tokens.cols());
        cx.device.gather(tokens.view(), self.gate.router.top_k, routed.order(), rows.view_mut());
        cx.groups.to_experts(cx.device, dispatch, rows)
    }

    /// Places of each token's slots.
    fn slots<'a>(&self, routed: &'a Routed, weights: Option<View<'a>>) -> Combine<'a> {
        Combine { place: routed.place.view(), weights, top_k: self.gate.router.top_k }
    }
}
