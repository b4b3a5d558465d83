//! Mixture of experts: choosing, moving tokens to experts and back.

use super::{Device, Operation, with_float};
use crate::cpu::routing::{self, Choice, ChoiceBackward};
use crate::{View, ViewMut};

pub use crate::cpu::routing::{Router, balance_loss};

impl Device {
    /// Probabilities of all experts for each token, the `top_k` likeliest and their weights.
    pub fn route(
        &self,
        router: &Router,
        logits: View<'_>,
        probs: ViewMut<'_>,
        log_sum: ViewMut<'_>,
        chosen: ViewMut<'_>,
        weights: ViewMut<'_>,
    ) {
        let (probs, log_sum) = (probs.host(), log_sum.host());
        let choice = Choice { probs, log_sum, chosen: chosen.host(), weights: weights.host() };
        self.on_cpu(Operation::Routing, |cpu| routing::choose(cpu, *router, logits.host(), choice))
    }

    /// The gradient of the logits: of the weights, of the balance loss (`balance`, one number per expert) and
    /// of the z-loss.
    #[allow(clippy::too_many_arguments)] // all that `route` gave, and a gradient for each
    pub fn route_backward(
        &self,
        router: &Router,
        probs: View<'_>,
        log_sum: View<'_>,
        chosen: View<'_>,
        weights: View<'_>,
        dweights: View<'_>,
        balance: View<'_>,
        z_loss: f32,
        dlogits: ViewMut<'_>,
    ) {
        let from = ChoiceBackward {
            probs: probs.host(),
            log_sum: log_sum.host(),
            chosen: chosen.host(),
            weights: weights.host(),
            dweights: dweights.host(),
            balance: balance.host(),
            z_loss,
        };
        self.on_cpu(Operation::Routing, |cpu| {
            routing::choose_backward(cpu, *router, &from, dlogits.host())
        })
    }

    /// Puts each expert's slots side by side: `order`, where each expert's begin (`starts`), and the way back
    /// (`place`). Waits, and tells how many places are taken.
    pub fn group_slots(
        &self,
        chosen: View<'_>,
        capacity: Option<usize>,
        order: ViewMut<'_>,
        starts: ViewMut<'_>,
        place: ViewMut<'_>,
    ) -> usize {
        self.on_cpu(Operation::Routing, |_| {
            routing::group(chosen.host(), capacity, order.host(), starts.host(), place.host())
        })
    }

    /// Adds to `counts` the slots that chose each expert and to `sums` the probabilities of each; gives the
    /// z-loss before its mean. Waits.
    pub fn routed(
        &self,
        chosen: View<'_>,
        probs: View<'_>,
        log_sum: View<'_>,
        counts: &mut [u32],
        sums: &mut [f32],
    ) -> f64 {
        self.on_cpu(Operation::Routing, |cpu| {
            for &expert in chosen.host::<u32>() {
                counts[expert as usize] += 1;
            }
            crate::cpu::reduce::column_sums::<f32>(cpu, probs.host(), sums, true);
            routing::z_loss_sum(cpu, log_sum.host())
        })
    }

    /// The balance loss's gradient by the probability of each expert.
    pub fn balance_gradient(
        &self,
        counts: &[u32],
        tokens: u64,
        weight: f32,
        gradient: ViewMut<'_>,
    ) {
        self.on_cpu(Operation::Routing, |_| {
            routing::balance_gradient(counts, tokens, weight, gradient.host())
        })
    }

    /// Each token's row at the places of its slots.
    pub fn gather(&self, x: View<'_>, router: &Router, order: View<'_>, out: ViewMut<'_>) {
        let dim = x.cols();
        with_float!(x.dtype(), E => self.on_cpu(Operation::Routing, |cpu| {
            routing::gather::<E>(cpu, x.host(), dim, router.top_k, order.host(), out.host())
        }))
    }

    /// The weighted sum of each token's slots; without weights the plain one. Dropped slots give nothing.
    pub fn combine(
        &self,
        rows: View<'_>,
        router: &Router,
        place: View<'_>,
        weights: Option<View<'_>>,
        out: ViewMut<'_>,
        add: bool,
    ) {
        let weights = weights.map(|weights| weights.host::<f32>());
        with_float!(rows.dtype(), E => self.on_cpu(Operation::Routing, |cpu| {
            routing::combine::<E>(cpu, rows.host(), router.top_k, place.host(), weights, out.host(), add)
        }))
    }

    /// The dot product of the rows of `a` and `b` at each slot's place; zero where it was dropped.
    pub fn slot_dots(&self, a: View<'_>, b: View<'_>, place: View<'_>, out: ViewMut<'_>) {
        let dim = a.cols();
        with_float!(a.dtype(), E => self.on_cpu(Operation::Routing, |cpu| {
            routing::slot_dots::<E>(cpu, a.host(), b.host(), dim, place.host(), out.host())
        }))
    }

    /// Multiplies each place's row by its slot's weight.
    pub fn scale_slots(&self, rows: ViewMut<'_>, order: View<'_>, weights: View<'_>) {
        let dim = rows.cols();
        with_float!(rows.dtype(), E => self.on_cpu(Operation::Routing, |cpu| {
            routing::scale_slots::<E>(cpu, rows.host(), dim, order.host(), weights.host())
        }))
    }
}
