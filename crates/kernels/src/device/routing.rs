//! Mixture of experts: choosing, keeping experts evenly used, moving tokens to experts and back.

use super::{Device, OpClass, with_float};
use crate::cpu::routing::{self, Choice, ChoiceBackward};
use crate::{View, ViewMut, cpu::balance};

pub use crate::cpu::routing::{Capacity, Router};

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
        self.on_cpu(OpClass::Routing, |cpu| routing::choose(cpu, *router, logits.host(), choice))
    }

    /// The gradient of the logits: of the weights, of the balance loss (`balance` (scopes, experts), for equal
    /// runs of the rows) and of the z-loss.
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
        self.on_cpu(OpClass::Routing, |cpu| {
            routing::choose_backward(cpu, *router, &from, dlogits.host())
        })
    }

    /// Puts each expert's slots side by side: `order`, where each expert's begin (`starts`), and the way back
    /// (`place`). Waits, and tells how many places are taken.
    pub fn group_slots(
        &self,
        chosen: View<'_>,
        capacity: Option<Capacity>,
        order: ViewMut<'_>,
        starts: ViewMut<'_>,
        place: ViewMut<'_>,
    ) -> usize {
        self.on_cpu(OpClass::Routing, |cpu| {
            routing::group(cpu, chosen.host(), capacity, order.host(), starts.host(), place.host())
        })
    }

    /// Adds to `counts` the slots that chose each expert and to `sums` the probabilities of each, both
    /// (scopes, experts) for equal runs of the tokens.
    pub fn expert_loads(
        &self,
        router: &Router,
        chosen: View<'_>,
        probs: View<'_>,
        counts: ViewMut<'_>,
        sums: ViewMut<'_>,
    ) {
        let (chosen, probs) = (chosen.host(), probs.host());
        self.on_cpu(OpClass::Routing, |cpu| {
            balance::loads(cpu, router.experts, chosen, probs, counts.host(), sums.host())
        })
    }

    /// The mean of the scopes' balance losses, and `weight` times the slope of each scope's loss summed over
    /// its tokens, by the probability of each expert, (scopes, experts). Waits.
    pub fn balance(
        &self,
        router: &Router,
        counts: View<'_>,
        sums: View<'_>,
        weight: f32,
        gradient: ViewMut<'_>,
    ) -> f64 {
        let Router { experts, top_k, .. } = *router;
        let scopes = (counts.len() / experts) as f64;
        self.on_cpu(OpClass::Routing, |_| {
            let counts = counts.host::<f32>().chunks_exact(experts);
            let gradient = gradient.host::<f32>().chunks_exact_mut(experts);
            for (counts, gradient) in counts.clone().zip(gradient) {
                balance::gradient(counts, top_k, weight, gradient);
            }
            let sums = sums.host::<f32>().chunks_exact(experts);
            counts.zip(sums).map(|(counts, sums)| balance::loss(counts, sums, top_k)).sum::<f64>()
                / scopes
        })
    }

    /// Each token's row at the places of its slots.
    pub fn gather(&self, x: View<'_>, router: &Router, order: View<'_>, out: ViewMut<'_>) {
        let dim = x.cols();
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Routing, |cpu| {
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
        with_float!(rows.dtype(), E => self.on_cpu(OpClass::Routing, |cpu| {
            routing::combine::<E>(cpu, rows.host(), router.top_k, place.host(), weights, out.host(), add)
        }))
    }

    /// The dot product of each row of `a` with that of `b`.
    pub fn row_dots(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) {
        let dim = a.cols();
        with_float!(a.dtype(), E => self.on_cpu(OpClass::Routing, |cpu| {
            routing::row_dots::<E>(cpu, a.host(), b.host(), dim, out.host())
        }))
    }

    /// Multiplies each row by its factor.
    pub fn scale_rows(&self, rows: ViewMut<'_>, factors: View<'_>) {
        let dim = rows.cols();
        with_float!(rows.dtype(), E => self.on_cpu(OpClass::Routing, |cpu| {
            routing::scale_rows::<E>(cpu, rows.host(), dim, factors.host())
        }))
    }
}
