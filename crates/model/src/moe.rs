//! A mixture of experts in the Mixtral form: a router sends each token to its `top_k` likeliest experts, each
//! a SwiGLU of its own, and their outputs are summed with the router's weights.
//!
//! Tokens are copied into one matrix in which each expert's lie side by side: *places*. An expert works on
//! its rows of that matrix; which place belongs to which token is `order`, and the other way `place`.

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Router, Tag, Tensor, View};
use lockstep_plan::model::{BlockParams, Moe, Shape};

use crate::linear::Linear;
use crate::{Cx, Sink};

pub(crate) struct Experts {
    router: Linear,
    experts: Vec<Expert>,
    how: Router,
    moe: Moe,
    width: usize,
}

struct Expert {
    gate_up: Linear,
    down: Linear,
}

/// What the backward pass needs beside the input.
pub(crate) struct ExpertsSaved {
    probs: Tensor,   // (tokens, experts), f32
    log_sum: Tensor, // (tokens, 1), f32
    chosen: Tensor,  // (tokens, top_k), u32
    weights: Tensor, // (tokens, top_k), f32
    order: Tensor,   // (1, places), u32
    place: Tensor,   // (tokens, top_k), u32
    starts: Tensor,  // (1, experts + 1), u32
    places: usize,
    gate_up: Option<Tensor>, // (places, 2 ffn); none when it is computed again
}

/// What the routers of all layers did with a micro-batch: their auxiliary losses are of all of them together.
#[derive(Default)]
pub struct Auxiliary {
    /// Slots that chose each expert, dropped ones too.
    counts: Vec<u32>,
    /// Sum of each expert's probability.
    probs: Vec<f32>,
    /// Sum of squares of the logits' log-sum-exp.
    z: f64,
    /// Tokens × layers.
    rows: u64,
    /// Slots that their expert had no room for.
    pub dropped: u64,
}

impl Auxiliary {
    /// For a new micro-batch.
    pub(crate) fn clear(&mut self, experts: usize) {
        self.counts.resize(experts, 0);
        self.probs.resize(experts, 0.0);
        self.counts.fill(0);
        self.probs.fill(0.0);
        (self.z, self.rows, self.dropped) = (0.0, 0, 0);
    }

    /// The weighted losses.
    pub(crate) fn loss(&self, moe: &Moe) -> f64 {
        if self.rows == 0 {
            return 0.0;
        }
        let balance = lockstep_kernels::balance_loss(&self.counts, &self.probs, self.rows) as f64;
        moe.aux_loss * balance + moe.z_loss * self.z / self.rows as f64
    }
}

impl Experts {
    pub fn new(shape: &Shape, moe: Moe, params: &BlockParams) -> Experts {
        let expert = |number: usize| Expert {
            gate_up: Linear::joined(
                params,
                &[&format!("experts.{number}.gate"), &format!("experts.{number}.up")],
            ),
            down: Linear::new(params, &format!("experts.{number}.down")),
        };
        Experts {
            router: Linear::new(params, "router"),
            experts: (0..moe.experts).map(expert).collect(),
            how: Router { experts: moe.experts, top_k: moe.top_k, renormalise: true },
            moe,
            width: shape.ffn,
        }
    }

    /// Up to the experts' activation (places, ffn).
    pub fn inside(
        &self,
        cx: &Cx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        keep_inner: bool,
    ) -> (Tensor, ExpertsSaved) {
        let mut saved = self.route(cx, weights, normed);
        let (gate_up, after) = self.activated(cx, weights, normed, &saved, keep_inner);
        saved.gate_up = keep_inner.then_some(gate_up);
        (after, saved)
    }

    /// x + the experts' outputs.
    pub fn project(
        &self,
        cx: &Cx<'_>,
        weights: View<'_>,
        after: &Tensor,
        saved: &ExpertsSaved,
        x: &Tensor,
    ) -> Tensor {
        let device = cx.device;
        let mut rows = device.empty(saved.places, x.cols(), cx.dtype, Tag::Buffers);
        self.each(device, saved, |expert, part| {
            let out = rows.view_mut().rows_of(part.clone());
            device.matmul(expert.down.forward(weights, after.view().rows_of(part), out));
        });
        // Each rank of the tensor axis has a part of the sum; one of them adds the stream.
        let peers = cx.peers;
        let mut y = match peers.sequence {
            true => cx.scratch(cx.tokens(), x.cols()),
            false => cx.kept(cx.tokens(), x.cols()),
        };
        match peers.adds() && !peers.sequence {
            true => device.copy(x.view(), y.view_mut()),
            false => device.fill(y.view_mut(), 0.0),
        }
        device.combine(
            rows.view(),
            &self.how,
            saved.place.view(),
            Some(saved.weights.view()),
            y.view_mut(),
            true,
        );
        let mut y = peers.leave(device, y);
        if peers.sequence {
            device.add(y.view_mut(), x.view());
        }
        y
    }

    /// The gradient of the normed input.
    pub fn backward(
        &self,
        cx: &Cx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        mut saved: ExpertsSaved,
        dy: &Tensor,
        sink: &mut Sink<'_>,
    ) -> Tensor {
        let device = cx.device;
        let places = |cols| device.empty(saved.places, cols, cx.dtype, Tag::Buffers);
        let (order, slot_weights) =
            (saved.order.view().part(0..saved.places), saved.weights.view());
        let (gate_up, mut after) = match saved.gate_up.take() {
            Some(gate_up) => {
                let mut after = places(self.width);
                device.swiglu(gate_up.view(), after.view_mut());
                (gate_up, after)
            }
            None => self.activated(cx, weights, normed, &saved, false),
        };

        // A slot's output is weight · down(after). Its gradient by the weight is what the stream's gradient
        // becomes before the activation, dotted with the activation: no output needs to be kept for it.
        let mut drows = places(dy.cols());
        device.gather(dy.view(), &self.how, order, drows.view_mut());
        let mut dafter = places(self.width);
        self.each(device, &saved, |expert, part| {
            let (dy, dx) = (drows.view().rows_of(part.clone()), dafter.view_mut().rows_of(part));
            expert.down.input_gradient(device, weights, dy, dx);
        });
        let mut dweights = cx.device.empty(cx.tokens(), self.moe.top_k, Dtype::F32, Tag::Buffers);
        device.slot_dots(dafter.view(), after.view(), saved.place.view(), dweights.view_mut());
        cx.peers.sum_over_tensor(&mut dweights);
        device.scale_slots(after.view_mut(), order, slot_weights);
        device.scale_slots(dafter.view_mut(), order, slot_weights);
        self.each(device, &saved, |expert, part| {
            expert.down.weight_gradient_of(device, &drows, &after, part, sink);
        });
        drop((drows, after));

        // Through each expert's gate and up, back to the tokens.
        let mut dgate_up = places(2 * self.width);
        device.swiglu_backward(gate_up.view(), dafter.view(), dgate_up.view_mut());
        drop((gate_up, dafter));
        let mut input = places(normed.cols());
        device.gather(normed.view(), &self.how, order, input.view_mut());
        self.each(device, &saved, |expert, part| {
            expert.gate_up.weight_gradient_of(device, &dgate_up, &input, part, sink);
        });
        drop(input);
        let mut dinput = places(normed.cols());
        self.each(device, &saved, |expert, part| {
            let (dy, dx) = (dgate_up.view().rows_of(part.clone()), dinput.view_mut().rows_of(part));
            expert.gate_up.input_gradient(device, weights, dy, dx);
        });

        // Through the router.
        let dlogits = self.router_gradient(cx, &saved, &dweights);
        self.router.weight_gradient(device, &dlogits, normed, sink);
        let mut dnormed = cx.scratch(cx.tokens(), normed.cols());
        // All ranks of the tensor axis have the router's whole gradient: one of them adds it.
        match cx.peers.adds() {
            true => self.router.input_gradient(device, weights, dlogits.view(), dnormed.view_mut()),
            false => device.fill(dnormed.view_mut(), 0.0),
        }
        device.combine(
            dinput.view(),
            &self.how,
            saved.place.view(),
            None,
            dnormed.view_mut(),
            true,
        );
        dnormed
    }

    /// Which token goes where.
    fn route(&self, cx: &Cx<'_>, weights: View<'_>, normed: &Tensor) -> ExpertsSaved {
        let device = cx.device;
        let (tokens, Moe { experts, top_k, .. }) = (cx.tokens(), self.moe);
        let mut logits = device.empty(tokens, experts, Dtype::F32, Tag::Buffers);
        device.matmul(self.router.forward(weights, normed.view(), logits.view_mut()));

        let kept = |rows, cols, dtype| device.empty(rows, cols, dtype, Tag::Activations);
        let mut saved = ExpertsSaved {
            probs: kept(tokens, experts, Dtype::F32),
            log_sum: kept(tokens, 1, Dtype::F32),
            chosen: kept(tokens, top_k, Dtype::U32),
            weights: kept(tokens, top_k, Dtype::F32),
            order: kept(1, tokens * top_k, Dtype::U32),
            place: kept(tokens, top_k, Dtype::U32),
            starts: kept(1, experts + 1, Dtype::U32),
            places: 0,
            gate_up: None,
        };
        device.route(
            &self.how,
            logits.view(),
            saved.probs.view_mut(),
            saved.log_sum.view_mut(),
            saved.chosen.view_mut(),
            saved.weights.view_mut(),
        );
        let capacity = self.moe.capacity.map(|factor| {
            // At least one: an expert without room could never learn.
            ((factor * (tokens * top_k) as f64 / experts as f64).ceil() as usize).max(1)
        });
        saved.places = device.group_slots(
            saved.chosen.view(),
            capacity,
            saved.order.view_mut(),
            saved.starts.view_mut(),
            saved.place.view_mut(),
        );
        if let Some(auxiliary) = cx.auxiliary.filter(|_| cx.counting) {
            let mut all = auxiliary.borrow_mut();
            let all = &mut *all;
            all.z += device.routed(
                saved.chosen.view(),
                saved.probs.view(),
                saved.log_sum.view(),
                &mut all.counts,
                &mut all.probs,
            );
            all.rows += tokens as u64;
            all.dropped += (tokens * top_k - saved.places) as u64;
        }
        saved
    }

    /// Gate and up of every place, and the activation.
    fn activated(
        &self,
        cx: &Cx<'_>,
        weights: View<'_>,
        normed: &Tensor,
        saved: &ExpertsSaved,
        keep: bool,
    ) -> (Tensor, Tensor) {
        let device = cx.device;
        let places = |cols, tag| device.empty(saved.places, cols, cx.dtype, tag);
        let mut input = places(normed.cols(), Tag::Buffers);
        device.gather(
            normed.view(),
            &self.how,
            saved.order.view().part(0..saved.places),
            input.view_mut(),
        );
        let mut gate_up =
            places(2 * self.width, if keep { Tag::Activations } else { Tag::Buffers });
        self.each(device, saved, |expert, part| {
            let out = gate_up.view_mut().rows_of(part.clone());
            device.matmul(expert.gate_up.forward(weights, input.view().rows_of(part), out));
        });
        let mut after = places(self.width, Tag::Buffers);
        device.swiglu(gate_up.view(), after.view_mut());
        (gate_up, after)
    }

    fn router_gradient(&self, cx: &Cx<'_>, saved: &ExpertsSaved, dweights: &Tensor) -> Tensor {
        let (device, Moe { experts, aux_loss, z_loss, .. }) = (cx.device, self.moe);
        let mut dlogits = device.empty(cx.tokens(), experts, Dtype::F32, Tag::Buffers);
        let mut balance = device.zeros(1, experts, Dtype::F32, Tag::Buffers);
        let mut z_factor = 0.0;
        if let Some(auxiliary) = cx.auxiliary {
            let all = auxiliary.borrow();
            device.balance_gradient(
                &all.counts,
                all.rows,
                aux_loss as f32 * cx.share,
                balance.view_mut(),
            );
            z_factor = z_loss as f32 * cx.share / all.rows as f32;
        }
        device.route_backward(
            &self.how,
            saved.probs.view(),
            saved.log_sum.view(),
            saved.chosen.view(),
            saved.weights.view(),
            dweights.view(),
            balance.view(),
            z_factor,
            dlogits.view_mut(),
        );
        dlogits
    }

    /// Calls `work` with each expert and its places, also with those that have none: their gradient is zero,
    /// and must be written.
    fn each(
        &self,
        device: &Device,
        saved: &ExpertsSaved,
        mut work: impl FnMut(&Expert, Range<usize>),
    ) {
        let mut starts = [0u32; MOST_EXPERTS + 1];
        let starts = &mut starts[..self.experts.len() + 1];
        device.read(saved.starts.view(), starts);
        for (expert, bounds) in self.experts.iter().zip(starts.windows(2)) {
            work(expert, bounds[0] as usize..bounds[1] as usize);
        }
    }
}

/// More experts than any published model has in a layer.
const MOST_EXPERTS: usize = 1024;
