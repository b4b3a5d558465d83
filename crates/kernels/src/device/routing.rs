//! Mixture of experts: routing, load balancing, and moving tokens to experts and back.
//!
//! A token has `top_k` *slots*, one for each expert it is routed to. Slots are sorted by expert into *places*.

use super::{Backend, Device, OpClass, Scalar, with_float};
use crate::cpu::routing::{self, Choice, ChoiceBackward, Grouping, Slots};
use crate::cuda;
use crate::{View, ViewMut, cpu::balance};

/// Marks a slot that exceeded its expert's capacity.
pub const DROPPED: u32 = u32::MAX;

/// Configuration of a router.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    pub experts: usize,
    pub top_k: usize,
    /// Scale the weights of the selected experts to sum to 1 (Mixtral) instead of using the probabilities (Switch).
    pub renormalize: bool,
}

/// Capacity of each expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Maximum number of slots per expert and scope. Later slots are dropped.
    pub slots: usize,
    /// Number of equal runs of tokens, each with its own capacity.
    pub scopes: usize,
}

/// Results of a router, all of them needed by the backward pass.
pub struct RouterOutput<'a> {
    /// Softmax of the logits.
    pub probs: ViewMut<'a>, // (tokens, experts), f32
    /// Log-sum-exp of the logits, for the z-loss.
    pub log_sum: ViewMut<'a>, // (tokens), f32
    /// Selected experts, most probable first.
    pub chosen: ViewMut<'a>, // (tokens, top_k), u32
    pub weights: ViewMut<'a>, // (tokens, top_k), f32
}

/// Inputs of a router's backward pass: its results, and the gradients of its weights and auxiliary losses.
#[derive(Clone, Copy)]
pub struct RouterSaved<'a> {
    pub probs: View<'a>,    // (tokens, experts), f32
    pub log_sum: View<'a>,  // (tokens), f32
    pub chosen: View<'a>,   // (tokens, top_k), u32
    pub weights: View<'a>,  // (tokens, top_k), f32
    pub dweights: View<'a>, // (tokens, top_k), f32
    /// Gradient of the balance loss by the probabilities of each scope; empty without that loss.
    pub balance: View<'a>, // (scopes, experts), f32
    /// Weight of the z-loss divided by the number of tokens it is averaged over.
    pub z_loss: f32,
}

/// Where to find the expert outputs of each token.
#[derive(Clone, Copy)]
pub struct Combine<'a> {
    /// Place of each slot, or `DROPPED`.
    pub place: View<'a>, // (tokens, top_k), u32
    /// Weight of each slot; 1 if none.
    pub weights: Option<View<'a>>, // (tokens, top_k), f32
    pub top_k: usize,
}

impl Device {
    /// Selects the `top_k` most probable experts of each token; ties go to the lower index.
    pub fn route(&self, router: &Router, logits: View<'_>, output: RouterOutput<'_>) {
        let RouterOutput { probs, log_sum, chosen, weights } = output;
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => {
                let (probs, log_sum) = (probs.host(), log_sum.host());
                let (chosen, weights) = (chosen.host(), weights.host());
                let choice = Choice { probs, log_sum, chosen, weights };
                routing::choose(cpu, *router, logits.host(), choice)
            }
            Backend::Cuda(gpu) => {
                let output = RouterOutput { probs, log_sum, chosen, weights };
                cuda::routing::route(gpu, router, logits, output)
            }
        })
    }

    /// Gradient of the logits, from the weights, the balance loss and the z-loss.
    pub fn route_backward(&self, router: &Router, saved: RouterSaved<'_>, dlogits: ViewMut<'_>) {
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => {
                let from = ChoiceBackward {
                    probs: saved.probs.host(),
                    log_sum: saved.log_sum.host(),
                    chosen: saved.chosen.host(),
                    weights: saved.weights.host(),
                    dweights: saved.dweights.host(),
                    balance: saved.balance.host(),
                    z_loss: saved.z_loss,
                };
                routing::choose_backward(cpu, *router, &from, dlogits.host())
            }
            Backend::Cuda(gpu) => cuda::routing::route_backward(gpu, router, saved, dlogits),
        })
    }

    /// Sorts slots by expert: `order[place]` is the slot in a place, `place[slot]` the place of a slot, and
    /// `starts` (experts + 1) the first place of each expert. The last start is the number of places.
    pub fn group_slots(
        &self,
        chosen: View<'_>,
        capacity: Option<Capacity>,
        order: ViewMut<'_>,
        starts: ViewMut<'_>,
        place: ViewMut<'_>,
    ) {
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => {
                let (order, starts, place) = (order.host(), starts.host(), place.host());
                routing::group(cpu, chosen.host(), capacity, Grouping { order, starts, place });
            }
            Backend::Cuda(gpu) => {
                let grouping = cuda::routing::Grouping { order, starts, place };
                cuda::routing::group(gpu, chosen, capacity, grouping)
            }
        })
    }

    /// Adds the number of slots of each expert to `counts` and the sum of its probabilities to `sums`, both
    /// (scopes, experts) for equal runs of tokens.
    pub fn expert_loads(
        &self,
        router: &Router,
        chosen: View<'_>,
        probs: View<'_>,
        counts: ViewMut<'_>,
        sums: ViewMut<'_>,
    ) {
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => {
                let (chosen, probs) = (chosen.host(), probs.host());
                let loads = balance::Loads { counts: counts.host(), sums: sums.host() };
                balance::loads(cpu, router.experts, chosen, probs, loads)
            }
            Backend::Cuda(gpu) => {
                let loads = cuda::routing::Loads { counts, sums };
                cuda::routing::loads(gpu, router.experts, chosen, probs, loads)
            }
        })
    }

    /// Mean of the scopes' balance losses, from their (scopes, experts) counts and sums.
    pub fn balance_loss(&self, router: &Router, counts: View<'_>, sums: View<'_>) -> Scalar {
        let Router { experts, top_k, .. } = *router;
        let scopes = (counts.len() / experts) as f64;
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(_) => {
                let counts = counts.host::<f32>().chunks_exact(experts);
                let sums = sums.host::<f32>().chunks_exact(experts);
                let losses = counts.zip(sums).map(|(n, sums)| balance::loss(n, sums, top_k));
                Scalar::from(losses.sum::<f64>() / scopes)
            }
            Backend::Cuda(gpu) => cuda::routing::balance_loss(gpu, router, counts, sums),
        })
    }

    /// Writes to `gradient` (scopes, experts) `weight` times the derivative of each scope's balance loss, summed over
    /// its tokens, by the probability of each expert. Zero for a scope without slots.
    pub fn balance_gradient(
        &self,
        router: &Router,
        counts: View<'_>,
        weight: f32,
        gradient: ViewMut<'_>,
    ) {
        let Router { experts, top_k, .. } = *router;
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(_) => {
                let counts = counts.host::<f32>().chunks_exact(experts);
                let gradient = gradient.host::<f32>().chunks_exact_mut(experts);
                for (counts, gradient) in counts.zip(gradient) {
                    balance::gradient(counts, top_k, weight, gradient);
                }
            }
            Backend::Cuda(gpu) => {
                cuda::routing::balance_gradient(gpu, router, counts, weight, gradient)
            }
        })
    }

    /// Copies the row of each slot's token to the slot's place.
    pub fn gather(&self, x: View<'_>, top_k: usize, order: View<'_>, out: ViewMut<'_>) {
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(x.dtype(), E => {
                routing::gather::<E>(cpu, x.host(), top_k, order.host(), out.host())
            }),
            Backend::Cuda(gpu) => cuda::routing::gather(gpu, x, top_k, order, out),
        })
    }

    /// The weighted sum of each token's slots, without dropped ones. Adds to `out` if `accumulate`.
    pub fn combine(&self, rows: View<'_>, from: Combine<'_>, out: ViewMut<'_>, accumulate: bool) {
        let Combine { place, weights, top_k } = from;
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(rows.dtype(), E => {
                let (rows, place, out) = (rows.host::<E>(), place.host(), out.host());
                let weights = weights.map_or(&[][..], |weights| weights.host::<f32>());
                routing::combine(cpu, rows, Slots { top_k, place, weights }, out, accumulate)
            }),
            Backend::Cuda(gpu) => {
                let from = Combine { place, weights, top_k };
                cuda::routing::combine(gpu, rows, from, out, accumulate)
            }
        })
    }

    /// Dot product of each row of `a` with the same row of `b`.
    pub fn row_dots(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) {
        let dim = a.cols();
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(a.dtype(), E => {
                routing::row_dots::<E>(cpu, a.host(), b.host(), dim, out.host())
            }),
            Backend::Cuda(gpu) => cuda::routing::row_dots(gpu, a, b, out),
        })
    }

    /// Multiplies each row by its factor.
    pub fn scale_rows(&self, rows: ViewMut<'_>, factors: View<'_>) {
        let dim = rows.cols();
        self.execute(OpClass::Routing, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(rows.dtype(), E => {
                routing::scale_rows::<E>(cpu, rows.host(), dim, factors.host())
            }),
            Backend::Cuda(gpu) => cuda::routing::scale_rows(gpu, rows, factors),
        })
    }
}
