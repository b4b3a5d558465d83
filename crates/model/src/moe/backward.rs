//! The backward pass of a mixture of experts.

use lockstep_kernels::{Combine, Tensor};
use lockstep_plan::GroupKind;

use super::{Experts, Inner, Routing, SavedExperts};
use crate::{Ctx, WeightGrads};

/// Operands of the backward pass.
pub(crate) struct ExpertsBackward<'a> {
    /// The normed input of all tokens, recomputed.
    pub normed: &'a Tensor,
    pub dy: &'a Tensor,
}

impl Experts {
    /// The gradient of the normed input.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: SavedExperts,
        of: ExpertsBackward<'_>,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let (device, groups) = (cx.device, cx.groups);
        let ExpertsBackward { normed, dy } = of;
        let SavedExperts { routing, input, gate_up, shared } = saved;
        let dispatch = &routing.dispatch;
        let expert_rows = &dispatch.groups;
        let rows = |cols| cx.scratch(dispatch.rows, cols);
        let Inner { input, gate_up, mut hidden } = match gate_up {
            Some(gate_up) => {
                let mut hidden = rows(self.width);
                device.swiglu(gate_up.view(), hidden.view_mut());
                Inner { input, gate_up, hidden }
            }
            None => self.inner(cx, normed, &routing, false),
        };

        // The output of a slot is weight · down(hidden). The gradient of the weight is the dot product of `hidden` and
        // its gradient before the weight is applied, so no output needs to be saved.
        let drows = self.rows_at_experts(cx, &routing, dy);
        let mut dhidden = rows(self.width);
        self.down.input_gradient(cx, expert_rows, &drows, &mut dhidden);
        let dweights = self.slot_weights_gradient(cx, &routing, &dhidden, &hidden);
        let factors = self.slot_weights_at_experts(cx, &routing);
        device.scale_rows(hidden.view_mut(), factors.view());
        device.scale_rows(dhidden.view_mut(), factors.view());
        self.down.weight_gradient(expert_rows, &drows, &hidden, grads);
        drop((drows, hidden, factors));

        // Through each expert's gate and up, back to the tokens.
        let mut dgate_up = rows(2 * self.width);
        device.swiglu_backward(gate_up.view(), dhidden.view(), dgate_up.view_mut());
        drop((gate_up, dhidden));
        let input = input.unwrap_or_else(|| self.rows_at_experts(cx, &routing, normed));
        self.gate_up.weight_gradient(expert_rows, &dgate_up, &input, grads);
        drop(input);
        let mut dinput = rows(normed.cols());
        self.gate_up.input_gradient(cx, expert_rows, &dgate_up, &mut dinput);
        drop(dgate_up);
        let dinput = groups.from_experts(device, dispatch, dinput);

        // Through the router and the shared experts.
        let mut dnormed = {
            let dlogits = self.gate.logits_gradient(cx, &routing.routed, &dweights);
            self.gate.backward(cx, normed, &dlogits, grads)
        };
        let slots = self.slots(&routing.routed, None);
        device.combine(dinput.view(), slots, dnormed.view_mut(), true);
        drop(dinput);
        if let Some(dense) = &self.shared {
            // All tokens are here, and the input's gradient stays a part of the sum over the tensor axis.
            let here = |x: &Tensor| groups.gathered_sequence(device, x.clone());
            let before = shared.unwrap_or_else(|| dense.recompute(cx, here(normed)));
            let dbefore = dense.backward(cx, before, here(dy), grads);
            dense.up.weight_gradient(&dbefore, normed, grads);
            let mut more = cx.scratch(cx.tokens(), dy.cols());
            dense.up.input_gradient(cx, dbefore.view(), more.view_mut());
            drop(dbefore);
            device.add(dnormed.view_mut(), more.view());
        }
        dnormed
    }

    /// The weight of each row of the experts on this rank, (rows, 1), f32.
    fn slot_weights_at_experts(&self, cx: &Ctx<'_>, routing: &Routing) -> Tensor {
        let Routing { routed, dispatch } = routing;
        let mut places = cx.scratch_f32(routed.places, 1);
        let slots = routed.weights.view().shaped(routed.weights.len(), 1);
        cx.device.gather(slots, 1, routed.order(), places.view_mut());
        cx.groups.to_experts(cx.device, dispatch, places)
    }

    /// The gradient of each slot's weight, (tokens, top_k), f32.
    fn slot_weights_gradient(
        &self,
        cx: &Ctx<'_>,
        routing: &Routing,
        dhidden: &Tensor,
        hidden: &Tensor,
    ) -> Tensor {
        let (device, Routing { routed, dispatch }) = (cx.device, routing);
        let mut dots = cx.scratch_f32(dispatch.rows, 1);
        device.row_dots(dhidden.view(), hidden.view(), dots.view_mut());
        let dots = cx.groups.from_experts(device, dispatch, dots);
        let mut dweights = cx.scratch_f32(routed.weights.len(), 1);
        // One row per slot instead of one per token.
        let slots = Combine { top_k: 1, ..self.slots(routed, None) };
        device.combine(dots.view(), slots, dweights.view_mut(), false);
        cx.groups.all_reduce(cx.device, GroupKind::Tensor, &mut dweights);
        dweights.shaped(routed.weights.rows(), routed.weights.cols())
    }
}
