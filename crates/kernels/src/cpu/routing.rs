//! Mixture of experts: which tokens go to which experts and with what weights, and moving their rows there and
//! back; each with its backward. Knows nothing of what an expert computes, nor on which rank it lives.
//!
//! A token has `top_k` *slots*; slot `token * top_k + j` is its j-th choice. Tokens come in *scopes*, runs of
//! equally many that are counted by themselves: sequences, say.

use super::Cpu;
use super::math::exp;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::simd::{lane_sums, multiversion};
use crate::{Capacity, DROPPED, Float, Router};

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
                take_likeliest(probs, chosen, weights);
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
    /// The gradient of every probability of an expert in a scope, (scopes, experts), from
    /// `balance::gradient`; empty for none.
    pub balance: &'a [f32],
    /// The z-loss's weight over the number of tokens it is averaged over; 0 for none.
    pub z_loss: f32,
}

/// `dlogits` (tokens, experts), of the weights and of both auxiliary losses.
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
                // First the probabilities' gradient …
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
                // … then through the softmax; the z-loss pulls on all of it: d(lse²) = 2 lse p.
                let mean: f32 = probs.iter().zip(&*d).map(|(p, d)| p * d).sum();
                let pull = 2.0 * from.z_loss * from.log_sum[token] - mean;
                for (d, p) in d.iter_mut().zip(probs) {
                    *d = p * (*d + pull);
                }
            }
        },
    );
}

/// How many of `rows` are a scope, when something of `len` numbers has `experts` for each scope.
pub(super) fn rows_per_scope(rows: usize, len: usize, experts: usize) -> usize {
    assert!(len.is_multiple_of(experts), "{len} numbers are no rows of {experts}");
    let scopes = (len / experts).max(1);
    assert!(rows.is_multiple_of(scopes), "{rows} tokens are no {scopes} scopes");
    (rows / scopes).max(1)
}

/// Groups slots by expert, in the order of tokens: a stable counting sort. An expert takes what it has room
/// for (all, when there is no capacity). Writes
/// `order[i]`, the slot in place i; `starts` (experts + 1), where each expert's places begin; and
/// `place[slot]`, the slot's place or `DROPPED`. Returns how many places are filled.
pub fn group(
    cpu: &Cpu,
    chosen: &[u32],
    capacity: Option<Capacity>,
    order: &mut [u32],
    starts: &mut [u32],
    place: &mut [u32],
) -> usize {
    assert!(
        order.len() == chosen.len() && place.len() == chosen.len(),
        "one place for each of {}",
        chosen.len()
    );
    let Capacity { slots: room, scopes } =
        capacity.unwrap_or(Capacity { slots: usize::MAX, scopes: 1 });
    assert!(chosen.len().is_multiple_of(scopes), "{} slots in {scopes} scopes", chosen.len());
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    let scope = chosen.len().checked_div(scopes).unwrap_or(0).max(1);

    // A slot's place within its expert, counted in starts[expert + 1] …
    starts.fill(0);
    cpu.scratch[0].with_default(starts.len() - 1, |taken: &mut [u32]| {
        for (chosen, place) in chosen.chunks(scope).zip(place.chunks_mut(scope)) {
            taken.fill(0);
            for (&expert, place) in chosen.iter().zip(place) {
                let expert = expert as usize;
                *place = if taken[expert] < room { starts[expert + 1] } else { DROPPED };
                starts[expert + 1] += (taken[expert] < room) as u32;
                taken[expert] += (taken[expert] < room) as u32;
            }
        }
    });
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
    parallel_for(&cpu.team, order.len(), grain_rows(dim), by_rows(out, dim), |places, out| {
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
    parallel_for(
        &cpu.team,
        place.len() / top_k,
        grain_rows(dim * top_k),
        by_rows(out, dim),
        |tokens, out| {
            let slots = tokens.start * top_k..tokens.end * top_k;
            let weights = weights.map_or(&[][..], |weights| &weights[slots.clone()]);
            combine_tokens(cpu.level, rows, dim, top_k, &place[slots], weights, add, out);
        },
    );
}

/// `out[i] = a[i] · b[i]` of rows of `dim`. The gradient of a slot's weight, from both sides of any linear map
/// that stands between the weight and the rows.
pub fn row_dots<E: Float>(cpu: &Cpu, a: &[E], b: &[E], dim: usize, out: &mut [f32]) {
    assert!(a.len() == b.len() && a.len() == out.len() * dim, "a number for each row of {dim}");
    parallel_for(&cpu.team, out.len(), grain_rows(dim), by_rows(out, 1), |rows, out| {
        for (row, out) in rows.zip(out) {
            let row = row * dim..(row + 1) * dim;
            *out = dot(cpu.level, &a[row.clone()], &b[row]);
        }
    });
}

/// `rows[i] *= factors[i]`: with `gather`, the backward of `combine` for its rows.
pub fn scale_rows<E: Float>(cpu: &Cpu, rows: &mut [E], dim: usize, factors: &[f32]) {
    assert_eq!(rows.len(), factors.len() * dim, "a factor for each row of {dim}");
    parallel_for(&cpu.team, factors.len(), grain_rows(dim), by_rows(rows, dim), |range, rows| {
        for (&factor, row) in factors[range].iter().zip(rows.chunks_exact_mut(dim)) {
            scale_row(cpu.level, row, factor);
        }
    });
}

multiversion! {
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
