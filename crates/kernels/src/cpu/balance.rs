//! Load balancing of experts: load statistics and the auxiliary loss. They are computed per scope; statistics of the same
//! scope may be summed over ranks before they are used.

use super::Cpu;
use super::reduce::column_sums;
use super::routing::rows_per_scope;

/// Load statistics, both (scopes, experts).
pub struct Loads<'a> {
    /// Number of slots of each expert, including dropped ones.
    pub counts: &'a mut [f32],
    /// Sum of its probabilities.
    pub sums: &'a mut [f32],
}

/// Adds the statistics of some tokens.
pub fn loads(
    cpu: &Cpu,
    experts: usize,
    chosen: &[u32], // (tokens, top_k)
    probs: &[f32],  // (tokens, experts)
    Loads { counts, sums }: Loads<'_>,
) {
    let tokens = probs.len() / experts;
    let scope = rows_per_scope(tokens, counts.len(), experts);
    let slots = scope * chosen.len().checked_div(tokens).unwrap_or(1);
    assert_eq!(counts.len(), sums.len(), "counts and sums must have the same length");
    for (chosen, counts) in chosen.chunks(slots).zip(counts.chunks_exact_mut(experts)) {
        chosen.iter().for_each(|&expert| counts[expert as usize] += 1.0);
    }
    for (probs, sums) in probs.chunks(scope * experts).zip(sums.chunks_exact_mut(experts)) {
        column_sums(cpu, probs, sums, true);
    }
}

/// Load-balancing loss of one scope (Switch, Mixtral): `experts * Σ_e fraction_e * mean_prob_e`, where the fraction of an
/// expert is its number of slots divided by the number of tokens. It is `top_k` if experts are used evenly.
pub fn loss(counts: &[f32], sums: &[f32], top_k: usize) -> f64 {
    let Some(tokens) = tokens(counts, top_k) else { return 0.0 };
    let both = counts.iter().zip(sums);
    let both = both.map(|(&count, &sum)| (count as f64 / tokens) * (sum as f64 / tokens));
    counts.len() as f64 * both.sum::<f64>()
}

/// Gradient of `weight * loss * tokens` with respect to the probability of an expert, which is the same for all tokens
/// of the scope: `weight * experts * fraction_e`.
pub fn gradient(counts: &[f32], top_k: usize, weight: f32, gradient: &mut [f32]) {
    let factor = tokens(counts, top_k).map_or(0.0, |tokens| counts.len() as f64 / tokens);
    for (&count, gradient) in counts.iter().zip(gradient) {
        *gradient = (weight as f64 * factor * count as f64) as f32;
    }
}

/// Number of tokens, which have `top_k` slots each; `None` if there are no slots.
fn tokens(counts: &[f32], top_k: usize) -> Option<f64> {
    let slots: f64 = counts.iter().map(|&count| count as f64).sum();
    (slots > 0.0).then_some(slots / top_k as f64)
}
