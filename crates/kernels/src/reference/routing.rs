//! Mixture of experts: routing, moving rows, and auxiliary losses.

use crate::{Capacity, DROPPED, Router};

/// Returns (probs, chosen, weights).
pub fn choose(router: Router, logits: &[f64]) -> (Vec<f64>, Vec<u32>, Vec<f64>) {
    let (mut probs, mut chosen, mut weights) = (vec![], vec![], vec![]);
    for row in logits.chunks_exact(router.experts) {
        let p = softmax(row);
        let mut by_likelihood: Vec<usize> = (0..router.experts).collect();
        by_likelihood.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
        let taken = &by_likelihood[..router.top_k];
        let all: f64 = if router.renormalize { taken.iter().map(|&e| p[e]).sum() } else { 1.0 };
        chosen.extend(taken.iter().map(|&e| e as u32));
        weights.extend(taken.iter().map(|&e| p[e] / all));
        probs.extend(p);
    }
    (probs, chosen, weights)
}

/// Weights of given experts. Only these are differentiable, not the choice.
pub fn weights_of(router: Router, logits: &[f64], chosen: &[u32]) -> Vec<f64> {
    let rows = logits.chunks_exact(router.experts).zip(chosen.chunks_exact(router.top_k));
    rows.flat_map(|(row, chosen)| {
        let p = softmax(row);
        let all: f64 =
            if router.renormalize { chosen.iter().map(|&e| p[e as usize]).sum() } else { 1.0 };
        chosen.iter().map(move |&e| p[e as usize] / all).collect::<Vec<_>>()
    })
    .collect()
}

/// Gradient of the logits from the gradient of the weights, by the full Jacobian of the softmax.
pub fn weights_backward(
    router: Router,
    logits: &[f64],
    chosen: &[u32],
    dweights: &[f64],
) -> Vec<f64> {
    let Router { experts, top_k, renormalize } = router;
    let mut dlogits = vec![];
    for (token, row) in logits.chunks_exact(experts).enumerate() {
        let p = softmax(row);
        let (chosen, dw) = (&chosen[token * top_k..][..top_k], &dweights[token * top_k..][..top_k]);
        let all: f64 = chosen.iter().map(|&e| p[e as usize]).sum();
        let mut dp = vec![0.0; experts];
        for (i, &e) in chosen.iter().enumerate() {
            for (j, &other) in chosen.iter().enumerate() {
                // w_j = p_j / all: dw_j/dp_i = [i = j] / all - p_j / all².
                let same = if i == j { 1.0 } else { 0.0 };
                let slope =
                    if renormalize { same / all - p[other as usize] / (all * all) } else { same };
                dp[e as usize] += dw[j] * slope;
            }
        }
        dlogits.extend(softmax_backward(&p, &dp));
    }
    dlogits
}

/// `experts Σ_e (slots of e / tokens) (mean probability of e)`, averaged over `scopes` equal runs of tokens.
pub fn balance_loss(logits: &[f64], experts: usize, chosen: &[u32], scopes: usize) -> f64 {
    let tokens = logits.len() / experts / scopes;
    let one = |(logits, chosen): (&[f64], &[u32])| {
        let mut means = vec![0.0; experts];
        for row in logits.chunks_exact(experts) {
            softmax(row).iter().zip(&mut means).for_each(|(p, mean)| *mean += p / tokens as f64);
        }
        experts as f64
            * (0..experts).map(|e| slots(chosen, e) / tokens as f64 * means[e]).sum::<f64>()
    };
    by_scope(logits, chosen, scopes).map(one).sum::<f64>() / scopes as f64
}

pub fn balance_backward(logits: &[f64], experts: usize, chosen: &[u32], scopes: usize) -> Vec<f64> {
    let tokens = (logits.len() / experts / scopes) as f64;
    let one = |(logits, chosen): (&[f64], &[u32])| {
        let slope = |e| experts as f64 * slots(chosen, e) / tokens / tokens / scopes as f64;
        let dp: Vec<f64> = (0..experts).map(slope).collect();
        let rows = logits.chunks_exact(experts);
        rows.flat_map(|row| softmax_backward(&softmax(row), &dp)).collect::<Vec<_>>()
    };
    by_scope(logits, chosen, scopes).flat_map(one).collect()
}

/// Number of slots routed to an expert.
fn slots(chosen: &[u32], expert: usize) -> f64 {
    chosen.iter().filter(|&&one| one as usize == expert).count() as f64
}

fn by_scope<'a>(
    logits: &'a [f64],
    chosen: &'a [u32],
    scopes: usize,
) -> impl Iterator<Item = (&'a [f64], &'a [u32])> {
    let some = |len: usize| (len / scopes).max(1);
    logits.chunks(some(logits.len())).zip(chosen.chunks(some(chosen.len())))
}

/// Mean over tokens of ln² Σ e^logit.
pub fn z_loss(logits: &[f64], experts: usize) -> f64 {
    let tokens = (logits.len() / experts) as f64;
    logits.chunks_exact(experts).map(|row| log_sum(row).powi(2) / tokens).sum()
}

pub fn z_loss_backward(logits: &[f64], experts: usize) -> Vec<f64> {
    let tokens = (logits.len() / experts) as f64;
    let one = |row: &[f64]| {
        softmax(row).iter().map(|p| 2.0 * log_sum(row) * p / tokens).collect::<Vec<_>>()
    };
    logits.chunks_exact(experts).flat_map(one).collect()
}

/// Sorts slots by expert. Returns (order, starts, place).
pub fn group(
    chosen: &[u32],
    experts: usize,
    capacity: Option<Capacity>,
) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let Capacity { slots: limit, scopes } =
        capacity.unwrap_or(Capacity { slots: usize::MAX, scopes: 1 });
    let (mut order, mut starts, mut place) = (vec![], vec![0], vec![DROPPED; chosen.len()]);
    for expert in 0..experts as u32 {
        for scope in 0..scopes {
            let slots = chosen.len() / scopes * scope..chosen.len() / scopes * (scope + 1);
            for slot in slots.filter(|&slot| chosen[slot] == expert).take(limit) {
                place[slot] = order.len() as u32;
                order.push(slot as u32);
            }
        }
        starts.push(order.len() as u32);
    }
    (order, starts, place)
}

/// `out[token] = Σ weight * row` over the token's slots without dropped ones.
pub fn combine(rows: &[f64], dim: usize, top_k: usize, place: &[u32], weights: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; place.len() / top_k * dim];
    for (slot, &place) in place.iter().enumerate() {
        if place != DROPPED {
            (0..dim).for_each(|j| {
                out[slot / top_k * dim + j] += weights[slot] * rows[place as usize * dim + j]
            });
        }
    }
    out
}

/// Returns (drows, dweights).
pub fn combine_backward(
    rows: &[f64],
    dim: usize,
    top_k: usize,
    place: &[u32],
    weights: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut drows, mut dweights) = (vec![0.0; rows.len()], vec![0.0; weights.len()]);
    for (slot, &place) in place.iter().enumerate() {
        if place != DROPPED {
            for j in 0..dim {
                let (row, dy) = (place as usize * dim + j, dy[slot / top_k * dim + j]);
                drows[row] = weights[slot] * dy;
                dweights[slot] += rows[row] * dy;
            }
        }
    }
    (drows, dweights)
}

fn log_sum(row: &[f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln() + max
}

fn softmax(row: &[f64]) -> Vec<f64> {
    row.iter().map(|logit| (logit - log_sum(row)).exp()).collect()
}

fn softmax_backward(p: &[f64], dp: &[f64]) -> Vec<f64> {
    let mean: f64 = p.iter().zip(dp).map(|(p, dp)| p * dp).sum();
    p.iter().zip(dp).map(|(p, dp)| p * (dp - mean)).collect()
}
