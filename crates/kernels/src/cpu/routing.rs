//! Mixture of experts: which tokens go to which experts and with what weights, moving their rows there and
//! back, and the losses that keep the experts evenly used; each with its backward. Knows nothing of what an
//! expert computes, nor on which rank it lives.
//!
//! A token has `top_k` *slots*; slot `token * top_k + j` is its j-th choice.

use super::Cpu;
use super::cut::{cut, split, worth};
use super::math::exp;
use super::simd::{lane_sums, leveled};
use crate::Float;

/// In `place`: a slot that its expert had no room for.
pub const DROPPED: u32 = u32::MAX;

/// How a router chooses.
#[derive(Clone, Copy, Debug)]
pub struct Router {
    pub experts: usize,
    pub top_k: usize,
    /// Whether the chosen weights are scaled to sum to 1 (Mixtral); else they stay probabilities (Switch).
    pub renormalise: bool,
}

/// What the router decided, one row per token.
pub struct Choice<'a> {
    pub probs: &'a mut [f32],   // (tokens, experts): softmax of the logits
    pub log_sum: &'a mut [f32], // (tokens): ln Σ e^logit, for the z-loss
    pub chosen: &'a mut [u32],  // (tokens, top_k): experts, the likeliest first
    pub weights: &'a mut [f32], // (tokens, top_k)
}

/// Softmax over all experts, then the `top_k` likeliest; of equals the lower index.
pub fn choose(cpu: &Cpu, router: Router, logits: &[f32], choice: Choice) {
    let (experts, top_k) = (router.experts, router.top_k);
    let tokens = router.tokens(logits.len());
    let outputs = (
        cut(choice.probs, experts),
        cut(choice.log_sum, 1),
        cut(choice.chosen, top_k),
        cut(choice.weights, top_k),
    );
    split(
        &cpu.team,
        tokens,
        worth(experts * 8),
        outputs,
        |range, (probs, log_sum, chosen, weights)| {
            for (row, token) in range.enumerate() {
                let probs = &mut probs[row * experts..][..experts];
                log_sum[row] = softmax(cpu.level, &logits[token * experts..][..experts], probs);
                let (chosen, weights) =
                    (&mut chosen[row * top_k..][..top_k], &mut weights[row * top_k..][..top_k]);
                take_likeliest(probs, chosen, weights);
                if router.renormalise {
                    let all: f32 = weights.iter().sum();
                    weights.iter_mut().for_each(|weight| *weight /= all);
                }
            }
        },
    );
}

impl Router {
    fn tokens(&self, logits: usize) -> usize {
        let Router { experts, top_k, .. } = *self;
        assert!(top_k > 0 && top_k <= experts, "top_k={top_k} of {experts} experts");
        assert!(logits.is_multiple_of(experts), "{logits} logits are no rows of {experts}");
        logits / experts
    }
}

/// The largest first; of equals the lower index.
fn take_likeliest(probs: &[f32], chosen: &mut [u32], weights: &mut [f32]) {
    for j in 0..chosen.len() {
        let mut best: Option<usize> = None;
        for e in 0..probs.len() {
            if !chosen[..j].contains(&(e as u32)) && best.is_none_or(|best| probs[e] > probs[best])
            {
                best = Some(e);
            }
        }
        let best = best.expect("top_k is at most the number of experts");
        (chosen[j], weights[j]) = (best as u32, probs[best]);
    }
}

/// What the router's backward reads.
pub struct ChoiceBackward<'a> {
    pub probs: &'a [f32], // as `choose` left them
    pub log_sum: &'a [f32],
    pub chosen: &'a [u32],
    pub weights: &'a [f32],
    pub dweights: &'a [f32], // (tokens, top_k)
    /// The gradient of every probability of an expert, (experts), from `balance_gradient`; empty for none.
    pub balance: &'a [f32],
    /// The z-loss's weight over the number of tokens it is averaged over; 0 for none.
    pub z_loss: f32,
}

/// `dlogits` (tokens, experts), of the weights and of both auxiliary losses.
pub fn choose_backward(cpu: &Cpu, router: Router, from: &ChoiceBackward, dlogits: &mut [f32]) {
    let (experts, top_k) = (router.experts, router.top_k);
    let tokens = router.tokens(dlogits.len());
    assert!(
        from.balance.is_empty() || from.balance.len() == experts,
        "{} of {experts} experts",
        from.balance.len()
    );
    split(&cpu.team, tokens, worth(experts * 8), cut(dlogits, experts), |range, dlogits| {
        for (token, d) in range.zip(dlogits.chunks_exact_mut(experts)) {
            let probs = &from.probs[token * experts..][..experts];
            let slots = token * top_k..(token + 1) * top_k;
            // First the probabilities' gradient …
            if from.balance.is_empty() {
                d.fill(0.0);
            } else {
                d.copy_from_slice(from.balance);
            }
            let (weights, dweights) = (&from.weights[slots.clone()], &from.dweights[slots.clone()]);
            let along: f32 = weights.iter().zip(dweights).map(|(w, dw)| w * dw).sum();
            let all: f32 = from.chosen[slots.clone()].iter().map(|&e| probs[e as usize]).sum();
            for (&e, dw) in from.chosen[slots].iter().zip(dweights) {
                d[e as usize] += if router.renormalise { (dw - along) / all } else { *dw };
            }
            // … then through the softmax; the z-loss pulls on all of it: d(lse²) = 2 lse p.
            let mean: f32 = probs.iter().zip(&*d).map(|(p, d)| p * d).sum();
            let pull = 2.0 * from.z_loss * from.log_sum[token] - mean;
            for (d, p) in d.iter_mut().zip(probs) {
                *d = p * (*d + pull);
            }
        }
    });
}

/// Slots per expert, before any are dropped.
pub fn counts(chosen: &[u32], counts: &mut [u32]) {
    counts.fill(0);
    for &expert in chosen {
        counts[expert as usize] += 1;
    }
}

/// Groups slots by expert, in the order of tokens: a stable counting sort. An expert takes its first
/// `capacity` slots (all, when there is none). Writes
/// `order[i]`, the slot in place i; `starts` (experts + 1), where each expert's places begin; and
/// `place[slot]`, the slot's place or `DROPPED`. Returns how many places are filled.
pub fn group(
    chosen: &[u32],
    capacity: Option<usize>,
    order: &mut [u32],
    starts: &mut [u32],
    place: &mut [u32],
) -> usize {
    assert!(
        order.len() == chosen.len() && place.len() == chosen.len(),
        "one place for each of {}",
        chosen.len()
    );
    let capacity =
        capacity.map_or(u32::MAX, |capacity| u32::try_from(capacity).unwrap_or(u32::MAX));

    // A slot's place within its expert, counted in starts[expert + 1] …
    starts.fill(0);
    for (&expert, place) in chosen.iter().zip(&mut *place) {
        let taken = &mut starts[expert as usize + 1];
        *place = if *taken < capacity { *taken } else { DROPPED };
        *taken += (*taken < capacity) as u32;
    }
    // … and behind all experts before it.
    for e in 1..starts.len() {
        starts[e] += starts[e - 1];
    }
    order.fill(DROPPED);
    for (slot, (&expert, place)) in chosen.iter().zip(place).enumerate() {
        if *place != DROPPED {
            *place += starts[expert as usize];
            order[*place as usize] = slot as u32;
        }
    }
    starts[starts.len() - 1] as usize
}

/// `out[i] = x[token of order[i]]`: tokens' rows (tokens, dim) to the places of their slots (places, dim).
/// Its backward is `combine` without weights.
pub fn gather<E: Float>(
    cpu: &Cpu,
    x: &[E],
    dim: usize,
    top_k: usize,
    order: &[u32],
    out: &mut [E],
) {
    assert_eq!(out.len(), order.len() * dim, "a row of {dim} for each place");
    split(&cpu.team, order.len(), worth(dim), cut(out, dim), |places, out| {
        for (&slot, out) in order[places].iter().zip(out.chunks_exact_mut(dim)) {
            out.copy_from_slice(&x[slot as usize / top_k * dim..][..dim]);
        }
    });
}

/// `out[token] = Σ weights[slot] rows[place[slot]]` over the token's slots in their order; dropped slots give
/// nothing. Without weights all are 1. Adds to `out` where `add` says so.
pub fn combine<E: Float>(
    cpu: &Cpu,
    rows: &[E],
    top_k: usize,
    place: &[u32],
    weights: Option<&[f32]>,
    out: &mut [E],
    add: bool,
) {
    let Some(dim) = out.len().checked_div(place.len() / top_k) else { return };
    assert_eq!(out.len() * top_k, place.len() * dim, "{} slots of rows of {dim}", place.len());
    split(&cpu.team, place.len() / top_k, worth(dim * top_k), cut(out, dim), |tokens, out| {
        let slots = tokens.start * top_k..tokens.end * top_k;
        let weights = weights.map_or(&[][..], |weights| &weights[slots.clone()]);
        combine_tokens(cpu.level, rows, dim, top_k, &place[slots], weights, add, out);
    });
}

/// The backward of `combine` for its rows: `drows[i] = weights[order[i]] dy[token of order[i]]`.
pub fn combine_backward_rows<E: Float>(
    cpu: &Cpu,
    dy: &[E],
    dim: usize,
    top_k: usize,
    order: &[u32],
    weights: &[f32],
    drows: &mut [E],
) {
    assert_eq!(drows.len(), order.len() * dim, "a row of {dim} for each place");
    split(&cpu.team, order.len(), worth(dim), cut(drows, dim), |places, drows| {
        for (&slot, drow) in order[places].iter().zip(drows.chunks_exact_mut(dim)) {
            let dy = &dy[slot as usize / top_k * dim..][..dim];
            scaled(cpu.level, dy, weights[slot as usize], drow);
        }
    });
}

/// The backward of `combine` for its weights: `dweights[slot] = rows[place[slot]] · dy[token]`, 0 if dropped.
pub fn combine_backward_weights<E: Float>(
    cpu: &Cpu,
    rows: &[E],
    dy: &[E],
    top_k: usize,
    place: &[u32],
    dweights: &mut [f32],
) {
    let Some(dim) = dy.len().checked_div(place.len() / top_k) else { return };
    assert_eq!(dweights.len(), place.len(), "a weight for each slot");
    split(&cpu.team, place.len(), worth(dim), cut(dweights, 1), |slots, dweights| {
        for (slot, dweight) in slots.zip(dweights) {
            *dweight = match place[slot] {
                DROPPED => 0.0,
                place => dot(
                    cpu.level,
                    &rows[place as usize * dim..][..dim],
                    &dy[slot / top_k * dim..][..dim],
                ),
            };
        }
    });
}

/// `out[slot] = a[place[slot]] · b[place[slot]]` of rows of `dim`, 0 if dropped: the gradient of a slot's
/// weight from both sides of any linear map that stands between the weight and the rows.
pub fn slot_dots<E: Float>(
    cpu: &Cpu,
    a: &[E],
    b: &[E],
    dim: usize,
    place: &[u32],
    out: &mut [f32],
) {
    assert!(a.len() == b.len() && out.len() == place.len(), "a number for each slot");
    split(&cpu.team, place.len(), worth(dim), cut(out, 1), |slots, out| {
        for (&place, out) in place[slots].iter().zip(out) {
            *out = match place {
                DROPPED => 0.0,
                place => {
                    let row = place as usize * dim..(place as usize + 1) * dim;
                    dot(cpu.level, &a[row.clone()], &b[row])
                }
            };
        }
    });
}

/// `rows[i] *= weights[order[i]]`
pub fn scale_slots<E: Float>(
    cpu: &Cpu,
    rows: &mut [E],
    dim: usize,
    order: &[u32],
    weights: &[f32],
) {
    assert_eq!(rows.len(), order.len() * dim, "a row of {dim} for each place");
    split(&cpu.team, order.len(), worth(dim), cut(rows, dim), |places, rows| {
        for (&slot, row) in order[places].iter().zip(rows.chunks_exact_mut(dim)) {
            scale_row(cpu.level, row, weights[slot as usize]);
        }
    });
}

/// Σ over tokens of each expert's probability, (experts): half of what the balance loss is made of.
pub fn prob_sums(cpu: &Cpu, probs: &[f32], sums: &mut [f32]) {
    super::reduce::column_sums(cpu, probs, sums, false);
}

/// The load-balancing loss (Switch, Mixtral): `experts * Σ_e fraction_e * mean_prob_e`, where an expert's
/// fraction is its slots over the tokens. `counts` and `sums` may be of many ranks' `tokens`.
/// Evenly used experts give `top_k`.
pub fn balance_loss(counts: &[u32], sums: &[f32], tokens: u64) -> f32 {
    let tokens = tokens as f64;
    let both = counts
        .iter()
        .zip(sums)
        .map(|(&count, &sum)| (count as f64 / tokens) * (sum as f64 / tokens));
    (counts.len() as f64 * both.sum::<f64>()) as f32
}

/// The balance loss's gradient, the same for every token's probability of an expert:
/// `weight * experts * fraction_e / tokens`.
pub fn balance_gradient(counts: &[u32], tokens: u64, weight: f32, gradient: &mut [f32]) {
    let factor = weight as f64 * counts.len() as f64 / (tokens as f64 * tokens as f64);
    for (&count, gradient) in counts.iter().zip(gradient) {
        *gradient = (factor * count as f64) as f32;
    }
}

/// The router's z-loss before its mean (ST-MoE): Σ over tokens of ln² Σ e^logit.
pub fn z_loss_sum(cpu: &Cpu, log_sum: &[f32]) -> f64 {
    super::reduce::sum_of_squares(cpu, log_sum)
}

leveled! {
    /// One token's probabilities; returns ln Σ e^logit.
    fn softmax<I>(logits: &[f32], probs: &mut [f32]) -> f32 {
        let n = logits.len();
        let probs = &mut probs[..n];
        let mut most = f32::NEG_INFINITY;
        for &logit in logits {
            most = if logit > most { logit } else { most };
        }
        for e in 0..n {
            probs[e] = exp::<I>(logits[e] - most);
        }
        let sum = lane_sums!(I, (p in probs) sum = sum + p);
        for p in probs {
            *p /= sum;
        }
        sum.ln() + most
    }

    fn combine_tokens<I, E: Float>(
        rows: &[E], dim: usize, top_k: usize, place: &[u32], weights: &[f32], add: bool, out: &mut [E],
    ) {
        for (token, out) in out.chunks_exact_mut(dim).enumerate() {
            let slots = token * top_k..(token + 1) * top_k;
            // Sixteen columns at a time stay in f32 until all slots are in: rounded once.
            for from in (0..dim).step_by(16) {
                let width = (dim - from).min(16);
                let out = &mut out[from..from + width];
                let mut sum = [0f32; 16];
                if add {
                    for j in 0..width {
                        sum[j] = out[j].wide();
                    }
                }
                for slot in slots.clone() {
                    if place[slot] != DROPPED {
                        let row = &rows[place[slot] as usize * dim + from..][..width];
                        let weight = if weights.is_empty() { 1.0 } else { weights[slot] };
                        for j in 0..width {
                            sum[j] = I::fma(row[j].wide(), weight, sum[j]);
                        }
                    }
                }
                for j in 0..width {
                    out[j] = E::narrow(sum[j]);
                }
            }
        }
    }

    fn scaled<I, E: Float>(from: &[E], factor: f32, to: &mut [E]) {
        let n = to.len();
        let from = &from[..n];
        for j in 0..n {
            to[j] = E::narrow(from[j].wide() * factor);
        }
    }

    fn scale_row<I, E: Float>(row: &mut [E], factor: f32) {
        for x in row {
            *x = E::narrow(x.wide() * factor);
        }
    }

    fn dot<I, E: Float>(a: &[E], b: &[E]) -> f32 {
        lane_sums!(I, (a in a, b in b) sum = I::fma(a, b, sum))
    }
}
