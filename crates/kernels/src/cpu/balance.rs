//! What keeps experts evenly used: how much each got, and the loss that grows where one got more. Counted scope by
//! scope; numbers of the same scope may be summed over ranks before they are used.

use super::Cpu;
use super::reduce::column_sums;
use super::routing::rows_per_scope;

/// Adds, for each scope of the tokens, how many slots chose each expert (dropped ones too) and the sum of its
/// probabilities to `counts` and `sums`, both (scopes, experts).
pub fn loads(
    cpu: &Cpu,
    experts: usize,
    chosen: &[u32], // (tokens, top_k)
    probs: &[f32],  // (tokens, experts)
    counts: &mut [f32],
    sums: &mut [f32],
) {
    let tokens = probs.len() / experts;
    let scope = rows_per_scope(tokens, counts.len(), experts);
    let slots = scope * chosen.len().checked_div(tokens).unwrap_or(1);
    assert_eq!(counts.len(), sums.len(), "a count and a sum for each expert");
    for (chosen, counts) in chosen.chunks(slots).zip(counts.chunks_exact_mut(experts)) {
        chosen.iter().for_each(|&expert| counts[expert as usize] += 1.0);
    }
    for (probs, sums) in probs.chunks(scope * experts).zip(sums.chunks_exact_mut(experts)) {
        column_sums(cpu, probs, sums, true);
    }
}

/// The load-balancing loss of one scope (Switch, Mixtral): `experts * Σ_e fraction_e * mean_prob_e`, where an
/// expert's fraction is its slots over the tokens. Evenly used experts give `top_k`.
pub fn loss(counts: &[f32], sums: &[f32], top_k: usize) -> f64 {
    let Some(tokens) = tokens(counts, top_k) else { return 0.0 };
    let both = counts.iter().zip(sums);
    let both = both.map(|(&count, &sum)| (count as f64 / tokens) * (sum as f64 / tokens));
    counts.len() as f64 * both.sum::<f64>()
}

/// `weight` times the slope of `loss * tokens`, the same for the probability of an expert in all tokens of the
/// scope: `weight * experts * fraction_e`.
pub fn gradient(counts: &[f32], top_k: usize, weight: f32, gradient: &mut [f32]) {
    let factor = tokens(counts, top_k).map_or(0.0, |tokens| counts.len() as f64 / tokens);
    for (&count, gradient) in counts.iter().zip(gradient) {
        *gradient = (weight as f64 * factor * count as f64) as f32;
    }
}

/// Each has `top_k` slots; none where there are none.
fn tokens(counts: &[f32], top_k: usize) -> Option<f64> {
    let slots: f64 = counts.iter().map(|&count| count as f64).sum();
    (slots > 0.0).then_some(slots / top_k as f64)
}
