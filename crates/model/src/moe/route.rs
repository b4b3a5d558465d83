//! The router: assigns each token to experts, and computes the two auxiliary losses. Every rank routes its own tokens;
//! the router does not know where experts are.
//!
//! Both losses are means over layers, so a layer does not need the counts of another. The balance loss is computed per
//! *scope*: each sequence, or the global batch. If several ranks hold parts of a sequence, they sum their counts in the
//! forward pass, a few numbers per expert. The counts of the global batch are those of the previous step (`loads.rs`).
//! The gradient is saved for the backward pass.

use lockstep_kernels::{
    Capacity, Dtype, Router, RouterOutput, RouterSaved, RowGroups, Scalar, Tag, Tensor, View,
};
use lockstep_plan::GroupKind;
use lockstep_plan::model::{Balance, BlockParams, Moe, Shape};

use super::auxiliary::LayerLosses;
use crate::linear::Linear;
use crate::{Ctx, WeightGrads};

pub(super) struct Gate {
    linear: Linear,
    pub router: Router,
    moe: Moe,
    /// Layers of the whole model, and the index of this one.
    layers: usize,
    layer: usize,
}

/// The routing of a micro-batch. A slot is one of a token's `top_k` choices. Slots are copied to *places*, which are
/// ordered by expert; `order` gives the slot of each place, `place` the place of each slot.
pub(super) struct Routed {
    probs: Tensor,       // (tokens, experts), f32
    log_sum: Tensor,     // (tokens, 1), f32
    chosen: Tensor,      // (tokens, top_k), u32
    pub weights: Tensor, // (tokens, top_k), f32
    order: Tensor,       // (1, tokens * top_k), u32, of which `places` are used
    pub place: Tensor,   // (tokens, top_k), u32
    /// The places of each expert.
    pub groups: RowGroups,
    pub places: usize,
    /// Gradient of the balance loss by the probabilities of each scope, (scopes, experts), f32; none if its weight is
    /// zero.
    balance: Option<Tensor>,
}

impl Gate {
    pub fn new(shape: &Shape, moe: Moe, params: &BlockParams) -> Gate {
        Gate {
            linear: Linear::new(params, "router"),
            router: Router { experts: moe.experts, top_k: moe.top_k, renormalize: true },
            moe,
            layers: shape.layers,
            // Block 0 is the embedding.
            layer: params.number - 1,
        }
    }

    pub fn forward(&self, cx: &Ctx<'_>, normed: &Tensor) -> Routed {
        let device = cx.device;
        let (tokens, Moe { experts, top_k, .. }) = (cx.tokens(), self.moe);
        let mut logits = cx.scratch_f32(tokens, experts);
        device.matmul(self.linear.forward(cx, normed.view(), logits.view_mut()));

        let saved_u32 = |rows, cols| device.empty(rows, cols, Dtype::U32, Tag::Activations);
        let (mut probs, mut log_sum) = (cx.saved_f32(tokens, experts), cx.saved_f32(tokens, 1));
        let (mut chosen, mut weights) = (saved_u32(tokens, top_k), cx.saved_f32(tokens, top_k));
        let mut order = saved_u32(1, tokens * top_k);
        let (mut place, mut starts) = (saved_u32(tokens, top_k), saved_u32(1, experts + 1));
        let output = RouterOutput {
            probs: probs.view_mut(),
            log_sum: log_sum.view_mut(),
            chosen: chosen.view_mut(),
            weights: weights.view_mut(),
        };
        device.route(&self.router, logits.view(), output);
        let capacity = self.capacity(cx);
        device.group_slots(
            chosen.view(),
            capacity,
            order.view_mut(),
            starts.view_mut(),
            place.view_mut(),
        );
        let groups = RowGroups::new(starts);
        // Without a capacity all slots have a place, and the host waits only if it needs to know the rows of each expert.
        let places = match capacity {
            None => tokens * top_k,
            Some(_) => groups.on_host(device)[experts] as usize,
        };
        let mut routed =
            Routed { probs, log_sum, chosen, weights, order, place, groups, places, balance: None };
        self.add_losses(cx, &mut routed);
        routed
    }

    /// The gradient of the logits (tokens, experts), f32, from that of the slots' weights.
    pub fn logits_gradient(&self, cx: &Ctx<'_>, routed: &Routed, dweights: &Tensor) -> Tensor {
        let mut dlogits = cx.scratch_f32(cx.tokens(), self.moe.experts);
        let z_loss = cx.auxiliary.map_or(0.0, |_| self.moe.z_loss as f32 * self.token_weight(cx));
        for (_, rows) in cx.placed_runs() {
            let saved = RouterSaved {
                probs: routed.probs.view().rows_of(rows.clone()),
                log_sum: routed.log_sum.view().rows_of(rows.clone()),
                chosen: routed.chosen.view().rows_of(rows.clone()),
                weights: routed.weights.view().rows_of(rows.clone()),
                dweights: dweights.view().rows_of(rows.clone()),
                balance: routed.balance.as_ref().map_or(View::of::<f32>(&[]), Tensor::view),
                z_loss,
            };
            cx.device.route_backward(&self.router, saved, dlogits.view_mut().rows_of(rows));
        }
        dlogits
    }

    /// The gradient of the normed input. Every rank of the tensor axis has the whole router; one of them adds it.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        normed: &Tensor,
        dlogits: &Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        self.linear.weight_gradient(dlogits, normed, grads);
        let mut dnormed = cx.scratch(cx.tokens(), normed.cols());
        match cx.groups.is_tensor_root() {
            true => self.linear.input_gradient(cx, dlogits.view(), dnormed.view_mut()),
            false => cx.device.fill(dnormed.view_mut(), 0.0),
        }
        dnormed
    }

    /// Slots that an expert takes from each sequence.
    fn capacity(&self, cx: &Ctx<'_>) -> Option<Capacity> {
        let Moe { experts, top_k, capacity, .. } = self.moe;
        capacity.map(|factor| {
            // The order within a sequence is known only to a rank that has all of it.
            let cut = (cx.groups.mesh.context, cx.runs.len());
            assert_eq!(cut, (1, 1), "expert capacity needs whole sequences");
            let slots = (factor * (cx.seq() * top_k) as f64 / experts as f64).ceil() as usize;
            // An expert that takes no slots could never learn.
            Capacity { slots: slots.max(1), scopes: cx.batch }
        })
    }

    /// Adds the auxiliary losses and loads, and saves the gradient of the balance loss.
    fn add_losses(&self, cx: &Ctx<'_>, routed: &mut Routed) {
        let Some(auxiliary) = cx.auxiliary else { return };
        let balance = match self.moe.balance {
            _ if self.moe.aux_loss == 0.0 => None,
            Balance::Sequence => Some(self.balance_sequences(cx, routed)),
            Balance::Batch => {
                self.balance_batch(cx, routed);
                None
            }
        };
        if cx.recomputing {
            return;
        }
        let losses = LayerLosses {
            balance: balance.map(|loss| (self.moe.aux_loss, loss)),
            z_loss: self.moe.z_loss,
            log_sum_squares: cx.device.sum_of_squares([routed.log_sum.view()]),
            tokens: cx.tokens(),
            layers: self.layers,
        };
        let dropped = routed.chosen.len() - routed.places;
        auxiliary.borrow_mut().add(losses, dropped);
        if let Some(loads) = cx.loads {
            let of = (routed.chosen.view(), routed.probs.view());
            loads.add(cx.device, self.layer, &self.router, of);
        }
    }

    /// The mean of the sequences' balance losses; saves its gradient.
    ///
    /// One all-reduce of 2 numbers per sequence and expert if several ranks hold parts of a sequence.
    fn balance_sequences(&self, cx: &Ctx<'_>, routed: &mut Routed) -> Scalar {
        let (device, experts) = (cx.device, self.moe.experts);
        let half = cx.batch * experts;
        let mut loads = device.zeros(2 * cx.batch, experts, Dtype::F32, Tag::Buffers);
        for (_, rows) in cx.placed_runs() {
            let chosen = routed.chosen.view().rows_of(rows.clone());
            let probs = routed.probs.view().rows_of(rows);
            let (counts, sums) = loads.view_mut().split_at(half);
            device.expert_loads(&self.router, chosen, probs, counts, sums);
        }
        cx.groups.all_reduce(cx.device, GroupKind::Context, &mut loads);

        let (counts, sums) = (loads.view().part(0..half), loads.view().part(half..2 * half));
        let mut gradient = cx.saved_f32(cx.batch, experts);
        device.balance_gradient(&self.router, counts, self.balance_weight(cx), gradient.view_mut());
        routed.balance = Some(gradient);
        device.balance_loss(&self.router, counts, sums)
    }

    /// Saves the gradient of the balance loss over the global batch, whose value is known only at the end of the step.
    fn balance_batch(&self, cx: &Ctx<'_>, routed: &mut Routed) {
        let loads = cx.loads.expect("a loss over the global batch needs the loads of its experts");
        let (counts, weight) = (loads.previous(self.layer), self.balance_weight(cx));
        let mut gradient = cx.saved_f32(1, self.moe.experts);
        cx.device.balance_gradient(&self.router, counts, weight, gradient.view_mut());
        routed.balance = Some(gradient);
    }

    /// The weight of a token in the balance loss. A scope is weighted by its tokens on all ranks, as cross-entropy is.
    fn balance_weight(&self, cx: &Ctx<'_>) -> f32 {
        self.moe.aux_loss as f32 * self.token_weight(cx)
    }

    /// The weight of a token in a loss that is the mean over the global batch and the layers.
    fn token_weight(&self, cx: &Ctx<'_>) -> f32 {
        cx.share / (cx.tokens().max(1) * self.layers) as f32
    }
}

impl Routed {
    /// The slot of each place.
    pub fn order(&self) -> View<'_> {
        self.order.view().part(0..self.places)
    }
}
