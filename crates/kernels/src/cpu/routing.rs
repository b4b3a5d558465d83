//! Mixture of experts: routing of tokens to experts, and moving their rows there and back, forward and backward. Knows
//! nothing about what an expert computes or on which rank it is.
//!
//! A token has `top_k` *slots*; slot `token * top_k + j` is its j-th expert. *Scopes* are equal runs of tokens, e.g.
//! sequences, whose statistics are computed separately.

use super::Cpu;
use super::math::exp;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::{lane_sums, multiversion};
use crate::{Capacity, DROPPED, Float, Router};

/// Results of a router, one row per token.
pub struct Choice<'a> {
    pub probs: &'a mut [f32],   // (tokens, experts): softmax of the logits
    pub log_sum: &'a mut [f32], // (tokens): ln Σ e^logit, for the z-loss
    pub chosen: &'a mut [u32],  // (tokens, top_k): experts, most probable first
    pub weights: &'a mut [f32], // (tokens, top_k)
}

/// Softmax over all experts, then the `top_k` most probable; ties go to the lower index.
pub fn choose(cpu: &Cpu, router: Router, logits: &[f32], choice: Choice) {
    let (experts, top_k) = (router.experts, router.top_k);
    let tokens = router.tokens(logits.len());
    let outputs = (
        by_rows(choice.probs, experts),
        by_rows(choice.log_sum, 1),
        by_rows(choice.chosen, top_k),
        by_rows(choice.weights, top_k),
    );
    parallel_for(
        &cpu.team,
        tokens,
        grain_rows(experts * 8),
        outputs,
        |range, (probs, log_sum, chosen, weights)| {
            for (row, token) in range.enumerate() {
                let probs = &mut probs[row * experts..][..experts];
                log_sum[row] = softmax(cpu.level, &logits[token * experts..][..experts], probs);
                let (chosen, weights) =
                    (&mut chosen[row * top_k..][..top_k], &mut weights[row * top_k..][..top_k]);
                select_top_k(probs, chosen, weights);
                if router.renormalize {
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
        assert!(
            top_k > 0 && top_k <= experts,
            "top_k={top_k} must be between 1 and {experts} experts"
        );
        assert!(
            logits.is_multiple_of(experts),
            "{logits} logits are not a multiple of {experts} experts"
        );
        logits / experts
    }
}

/// Selects the largest probabilities in descending order; ties go to the lower index.
fn select_top_k(probs: &[f32], chosen: &mut [u32], weights: &mut [f32]) {
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

/// Inputs of the router's backward pass.
pub struct ChoiceBackward<'a> {
    pub probs: &'a [f32], // as written by `choose`
    pub log_sum: &'a [f32],
    pub chosen: &'a [u32],
    pub weights: &'a [f32],
    pub dweights: &'a [f32], // (tokens, top_k)
    /// Gradient of the probability of each expert in a scope, (scopes, experts), from `balance::gradient`; may be empty.
    pub balance: &'a [f32],
    /// Weight of the z-loss divided by the number of tokens it is averaged over.
    pub z_loss: f32,
}

/// Computes `dlogits` (tokens, experts) from the gradients of the weights and of both auxiliary losses.
pub fn choose_backward(cpu: &Cpu, router: Router, from: &ChoiceBackward, dlogits: &mut [f32]) {
    let (experts, top_k) = (router.experts, router.top_k);
    let tokens = router.tokens(dlogits.len());
    let scope = rows_per_scope(tokens, from.balance.len(), experts);
    parallel_for(
        &cpu.team,
        tokens,
        grain_rows(experts * 8),
        by_rows(dlogits, experts),
        |range, dlogits| {
            for (token, d) in range.zip(dlogits.chunks_exact_mut(experts)) {
                let probs = &from.probs[token * experts..][..experts];
                let slots = token * top_k..(token + 1) * top_k;
                // The gradient of the probabilities …
                if from.balance.is_empty() {
                    d.fill(0.0);
                } else {
                    d.copy_from_slice(&from.balance[token / scope * experts..][..experts]);
                }
                let (weights, dweights) =
                    (&from.weights[slots.clone()], &from.dweights[slots.clone()]);
                let along: f32 = weights.iter().zip(dweights).map(|(w, dw)| w * dw).sum();
                let all: f32 = from.chosen[slots.clone()].iter().map(|&e| probs[e as usize]).sum();
                for (&e, dw) in from.chosen[slots].iter().zip(dweights) {
                    d[e as usize] += if router.renormalize { (dw - along) / all } else { *dw };
                }
                // … then through the softmax. The z-loss contributes d(lse²) = 2 lse p.
                let mean: f32 = probs.iter().zip(&*d).map(|(p, d)| p * d).sum();
                let offset = 2.0 * from.z_loss * from.log_sum[token] - mean;
                for (d, p) in d.iter_mut().zip(probs) {
                    *d = p * (*d + offset);
                }
            }
        },
    );
}

/// Rows per scope, if `len` numbers hold `experts` for each scope.
pub(super) fn rows_per_scope(rows: usize, len: usize, experts: usize) -> usize {
    assert!(len.is_multiple_of(experts), "{len} numbers are not a multiple of {experts} experts");
    let scopes = (len / experts).max(1);
    assert!(rows.is_multiple_of(scopes), "{rows} tokens are not a multiple of {scopes} scopes");
    (rows / scopes).max(1)
}

/// Slots grouped by expert.
pub struct Grouping<'a> {
    /// The slot in each place, by place. (slots)
    pub order: &'a mut [u32],
    /// The first place of each expert. (experts + 1)
    pub starts: &'a mut [u32],
    /// The place of each slot, or `DROPPED`. (slots)
    pub place: &'a mut [u32],
}

/// Groups slots by expert, in the order of tokens: a stable counting sort. Slots beyond the capacity of their expert are
/// dropped. Returns the number of places that are filled.
pub fn group(
    cpu: &Cpu,
    chosen: &[u32],
    capacity: Option<Capacity>,
    Grouping { order, starts, place }: Grouping<'_>,
) -> usize {
    assert!(
        order.len() == chosen.len() && place.len() == chosen.len(),
        "order and place must have {} elements",
        chosen.len()
    );
    let Capacity { slots: limit, scopes } =
        capacity.unwrap_or(Capacity { slots: usize::MAX, scopes: 1 });
    assert!(
        chosen.len().is_multiple_of(scopes),
        "{} slots are not a multiple of {scopes} scopes",
        chosen.len()
    );
    let limit = u32::try_from(limit).unwrap_or(u32::MAX);
    let scope = chosen.len().checked_div(scopes).unwrap_or(0).max(1);

    // The place of a slot within its expert, counted in starts[expert + 1] …
    starts.fill(0);
    cpu.scratch[0].with_default(starts.len() - 1, |taken: &mut [u32]| {
        for (chosen, place) in chosen.chunks(scope).zip(place.chunks_mut(scope)) {
            taken.fill(0);
            for (&expert, place) in chosen.iter().zip(place) {
                let expert = expert as usize;
                *place = if taken[expert] < limit { starts[expert + 1] } else { DROPPED };
                starts[expert + 1] += (taken[expert] < limit) as u32;
                taken[expert] += (taken[expert] < limit) as u32;
            }
        }
    });
    // … plus the places of all experts before it.
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

/// `out[i] = x[token of order[i]]`: copies rows of tokens (tokens, dim) to the places of their slots (places, dim). Its
/// backward pass is `combine` without weights.
pub fn gather<E: Float>(cpu: &Cpu, x: &[E], top_k: usize, order: &[u32], out: &mut [E]) {
    let Some(dim) = out.len().checked_div(order.len()) else { return };
    assert_eq!(out.len(), order.len() * dim, "out must have a row for each place");
    parallel_for(&cpu.team, order.len(), grain_rows(dim), by_rows(out, dim), |places, out| {
        for (&slot, out) in order[places].iter().zip(out.chunks_exact_mut(dim)) {
            out.copy_from_slice(&x[slot as usize / top_k * dim..][..dim]);
        }
    });
}

/// Places and weights of the slots of tokens.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    pub top_k: usize,
    /// Place of each slot, or `DROPPED`. (tokens, top_k)
    pub place: &'a [u32],
    /// Weight of each slot; all are 1 if empty. (tokens, top_k)
    pub weights: &'a [f32],
}

/// `out[token] = Σ weights[slot] rows[place[slot]]` over the token's slots in order, without dropped ones. Adds to `out` if
/// `add` is set.
pub fn combine<E: Float>(
    cpu: &Cpu,
    rows: &[E],
    Slots { top_k, place, weights }: Slots<'_>,
    out: &mut [E],
    add: bool,
) {
    let Some(dim) = out.len().checked_div(place.len() / top_k) else { return };
    assert_eq!(
        out.len() * top_k,
        place.len() * dim,
        "out must have a row of {dim} for the tokens of {} slots",
        place.len()
    );
    parallel_for(
        &cpu.team,
        place.len() / top_k,
        grain_rows(dim * top_k),
        by_rows(out, dim),
        |tokens, out| {
            let slots = tokens.start * top_k..tokens.end * top_k;
            let weights = if weights.is_empty() { weights } else { &weights[slots.clone()] };
            let slots = Slots { top_k, place: &place[slots], weights };
            combine_tokens(cpu.level, rows, slots, dim, add, out);
        },
    );
}

/// `out[i] = a[i] · b[i]` for rows of `dim`: the gradient of the weight of a slot.
pub fn row_dots<E: Float>(cpu: &Cpu, a: &[E], b: &[E], dim: usize, out: &mut [f32]) {
    assert!(
        a.len() == b.len() && a.len() == out.len() * dim,
        "a, b and out must have equal numbers of rows of {dim}"
    );
    parallel_for(&cpu.team, out.len(), grain_rows(dim), by_rows(out, 1), |rows, out| {
        for (row, out) in rows.zip(out) {
            let row = row * dim..(row + 1) * dim;
            *out = dot(cpu.level, &a[row.clone()], &b[row]);
        }
    });
}

/// `rows[i] *= factors[i]`: together with `gather`, the gradient of the rows of `combine`.
pub fn scale_rows<E: Float>(cpu: &Cpu, rows: &mut [E], dim: usize, factors: &[f32]) {
    assert_eq!(rows.len(), factors.len() * dim, "there must be one factor for each row of {dim}");
    parallel_for(&cpu.team, factors.len(), grain_rows(dim), by_rows(rows, dim), |range, rows| {
        for (&factor, row) in factors[range].iter().zip(rows.chunks_exact_mut(dim)) {
            scale_row(cpu.level, row, factor);
        }
    });
}

multiversion! {
    /// Probabilities of one token; returns ln Σ e^logit.
    fn softmax<I>(logits: &[f32], probs: &mut [f32]) -> f32 {
        let n = logits.len();
        let probs = &mut probs[..n];
        let mut max = f32::NEG_INFINITY;
        for &logit in logits {
            max = if logit > max { logit } else { max };
        }
        for e in 0..n {
            probs[e] = exp::<I>(logits[e] - max);
        }
        let sum = lane_sums!(I, (p in probs) sum = sum + p);
        for p in probs {
            *p /= sum;
        }
        sum.ln() + max
    }

    fn combine_tokens<I, E: Float>(
        rows: &[E], slots: Slots<'_>, dim: usize, add: bool, out: &mut [E],
    ) {
        let Slots { top_k, place, weights } = slots;
        for (token, out) in out.chunks_exact_mut(dim).enumerate() {
            let slots = token * top_k..(token + 1) * top_k;
            // Sixteen columns at a time are accumulated in f32 and rounded once.
            for from in (0..dim).step_by(16) {
                let width = (dim - from).min(16);
                let out = &mut out[from..from + width];
                let mut sum = [0f32; 16];
                if add {
                    for j in 0..width {
                        sum[j] = out[j].as_f32();
                    }
                }
                for slot in slots.clone() {
                    if place[slot] != DROPPED {
                        let row = &rows[place[slot] as usize * dim + from..][..width];
                        let weight = if weights.is_empty() { 1.0 } else { weights[slot] };
                        for j in 0..width {
                            sum[j] = I::fma(row[j].as_f32(), weight, sum[j]);
                        }
                    }
                }
                for j in 0..width {
                    out[j] = E::round_from(sum[j]);
                }
            }
        }
    }

    fn scale_row<I, E: Float>(row: &mut [E], factor: f32) {
        for x in row {
            *x = E::round_from(x.as_f32() * factor);
        }
    }

    fn dot<I, E: Float>(a: &[E], b: &[E]) -> f32 {
        lane_sums!(I, (a in a, b in b) sum = I::fma(a, b, sum))
    }
}
