//! The router: which of all experts each token goes to, and the two losses that keep it useful. Every rank
//! routes its own tokens; where experts are is not known here.
//!
//! Both losses are means over layers, so a layer needs no other's numbers. The balance loss is of *scopes*:
//! sequences by themselves, or a micro-batch of all replicas. Where ranks have parts of a scope they sum what
//! they counted in the forward pass, a few numbers per expert, and what the backward pass needs of it is kept.

use lockstep_kernels::{Capacity, Dtype, Router, Tag, Tensor, View};
use lockstep_plan::GroupKind;
use lockstep_plan::model::{Balance, BlockParams, Moe, Shape};

use crate::linear::Linear;
use crate::{Ctx, WeightGrads};

pub(super) struct Gate {
    linear: Linear,
    pub how: Router,
    moe: Moe,
    /// Of the whole model.
    layers: usize,
}

/// What was decided. Slots are copied side by side, expert by expert, to *places*: which slot is in which
/// place is `order`, and the other way `place`.
pub(super) struct Routed {
    probs: Tensor,       // (tokens, experts), f32
    log_sum: Tensor,     // (tokens, 1), f32
    chosen: Tensor,      // (tokens, top_k), u32
    pub weights: Tensor, // (tokens, top_k), f32
    order: Tensor,       // (1, places), u32, and room for dropped slots
    pub place: Tensor,   // (tokens, top_k), u32
    pub starts: Tensor,  // (1, experts + 1), u32
    pub places: usize,
    /// The balance loss's gradient by each probability of a scope, (scopes, experts), f32; none where that
    /// loss is not wanted.
    balance: Option<Tensor>,
}

impl Gate {
    pub fn new(shape: &Shape, moe: Moe, params: &BlockParams) -> Gate {
        Gate {
            linear: Linear::new(params, "router"),
            how: Router { experts: moe.experts, top_k: moe.top_k, renormalise: true },
            moe,
            layers: shape.layers,
        }
    }

    /// Which token goes where.
    pub fn forward(&self, cx: &Ctx<'_>, weights: View<'_>, normed: &Tensor) -> Routed {
        let device = cx.device;
        let (tokens, Moe { experts, top_k, .. }) = (cx.tokens(), self.moe);
        let mut logits = device.empty(tokens, experts, Dtype::F32, Tag::Buffers);
        device.matmul(self.linear.forward(weights, normed.view(), logits.view_mut()));

        let kept = |rows, cols, dtype| device.empty(rows, cols, dtype, Tag::Activations);
        let mut routed = Routed {
            probs: kept(tokens, experts, Dtype::F32),
            log_sum: kept(tokens, 1, Dtype::F32),
            chosen: kept(tokens, top_k, Dtype::U32),
            weights: kept(tokens, top_k, Dtype::F32),
            order: kept(1, tokens * top_k, Dtype::U32),
            place: kept(tokens, top_k, Dtype::U32),
            starts: kept(1, experts + 1, Dtype::U32),
            places: 0,
            balance: None,
        };
        device.route(
            &self.how,
            logits.view(),
            routed.probs.view_mut(),
            routed.log_sum.view_mut(),
            routed.chosen.view_mut(),
            routed.weights.view_mut(),
        );
        routed.places = device.group_slots(
            routed.chosen.view(),
            self.capacity(cx),
            routed.order.view_mut(),
            routed.starts.view_mut(),
            routed.place.view_mut(),
        );
        self.account(cx, &mut routed);
        routed
    }

    /// The gradient of the normed input by way of the router, which every rank of the tensor axis has whole:
    /// one of them gives it.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        routed: &Routed,
        dweights: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let device = cx.device;
        let mut dlogits = device.empty(cx.tokens(), self.moe.experts, Dtype::F32, Tag::Buffers);
        let z_loss = cx.auxiliary.map_or(0.0, |_| self.moe.z_loss as f32 * self.each_token(cx));
        for (_, rows) in cx.placed_runs() {
            let run = rows.clone();
            device.route_backward(
                &self.how,
                routed.probs.view().rows_of(run.clone()),
                routed.log_sum.view().rows_of(run.clone()),
                routed.chosen.view().rows_of(run.clone()),
                routed.weights.view().rows_of(run.clone()),
                dweights.view().rows_of(run),
                routed.balance.as_ref().map_or(View::of::<f32>(&[]), Tensor::view),
                z_loss,
                dlogits.view_mut().rows_of(rows),
            );
        }
        self.linear.weight_gradient(device, &dlogits, normed, grads);
        let mut dnormed = cx.scratch(cx.tokens(), normed.cols());
        match cx.groups.adds() {
            true => self.linear.input_gradient(device, weights, dlogits.view(), dnormed.view_mut()),
            false => device.fill(dnormed.view_mut(), 0.0),
        }
        dnormed
    }

    /// The room of an expert, of each sequence.
    fn capacity(&self, cx: &Ctx<'_>) -> Option<Capacity> {
        let Moe { experts, top_k, capacity, .. } = self.moe;
        capacity.map(|factor| {
            // Who comes first in a sequence can only be said by who has all of it.
            assert_eq!((cx.groups.mesh.context, cx.runs.len()), (1, 1), "sequences are not cut");
            let slots = (factor * (cx.seq() * top_k) as f64 / experts as f64).ceil() as usize;
            // At least one: an expert without room could never learn.
            Capacity { slots: slots.max(1), scopes: cx.batch }
        })
    }

    /// The losses of what was decided, and what the backward pass needs of them.
    fn account(&self, cx: &Ctx<'_>, routed: &mut Routed) {
        let Some(auxiliary) = cx.auxiliary else { return };
        let mut loss = 0.0;
        if self.moe.aux_loss > 0.0 {
            loss += self.moe.aux_loss * self.balance(cx, routed);
        }
        if cx.counting {
            let z = cx.device.sum_of_squares(routed.log_sum.view()) / cx.tokens().max(1) as f64;
            loss += self.moe.z_loss * z;
            let dropped = routed.chosen.len() - routed.places;
            auxiliary.borrow_mut().add(loss / self.layers as f64, dropped);
        }
    }

    /// The mean of the scopes' balance losses; keeps the gradient.
    ///
    /// One all-reduce of 2 numbers per scope and expert, where scopes are cut among ranks.
    fn balance(&self, cx: &Ctx<'_>, routed: &mut Routed) -> f64 {
        let (device, experts) = (cx.device, self.moe.experts);
        let (scopes, kind) = match self.moe.balance {
            Balance::Sequence => (cx.batch, GroupKind::Context),
            Balance::Batch => (1, GroupKind::Replicas),
        };
        let half = scopes * experts;
        let mut loads = device.zeros(2 * scopes, experts, Dtype::F32, Tag::Buffers);
        for (_, rows) in cx.placed_runs() {
            let chosen = routed.chosen.view().rows_of(rows.clone());
            let probs = routed.probs.view().rows_of(rows);
            let (counts, sums) = loads.view_mut().split_at(half);
            device.expert_loads(&self.how, chosen, probs, counts, sums);
        }
        cx.groups.sum_over(kind, &mut loads);

        // A scope's loss counts by its tokens, here and elsewhere, as cross-entropy does.
        let weight = self.moe.aux_loss as f32 * self.each_token(cx);
        let (counts, sums) = (loads.view().part(0..half), loads.view().part(half..2 * half));
        let mut balance = cx.kept_wide(scopes, experts);
        let loss = device.balance(&self.how, counts, sums, weight, balance.view_mut());
        routed.balance = Some(balance);
        loss
    }

    /// The weight of a token's part in a loss that is the mean over the global batch and the layers.
    fn each_token(&self, cx: &Ctx<'_>) -> f32 {
        cx.share / (cx.tokens().max(1) * self.layers) as f32
    }
}

impl Routed {
    /// The slot in each place.
    pub fn order(&self) -> View<'_> {
        self.order.view().part(0..self.places)
    }
}
