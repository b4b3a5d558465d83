//! Sampling of the next token from logits.

/// Sampling parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Zero selects the most probable token.
    pub temperature: f32,
    /// Sample only from this many of the most probable tokens.
    pub top_k: Option<usize>,
    /// Sample only from the most probable tokens that together reach this probability.
    pub top_p: Option<f32>,
}

/// Samples a token; `uniform` is a random number in [0, 1).
pub fn sample(logits: &[f32], sampling: &Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Descending, ties by lower id, so that a seed always gives the same text.
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if sampling.temperature <= 0.0 {
        return order[0];
    }
    order.truncate(sampling.top_k.unwrap_or(usize::MAX).max(1));
    let top = logits[order[0] as usize];
    let weight =
        |&id: &u32| ((logits[id as usize] - top) as f64 / sampling.temperature as f64).exp();
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();

    let mass = total * sampling.top_p.map_or(1.0, |p| p as f64).clamp(0.0, 1.0);
    let mut count = 0;
    let mut sum = 0.0;
    while count < weights.len() && (count == 0 || sum < mass) {
        sum += weights[count];
        count += 1;
    }
    let mut left = uniform * sum;
    for (id, weight) in order.iter().zip(&weights[..count]) {
        left -= weight;
        if left < 0.0 {
            return *id;
        }
    }
    order[count - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: None };

    #[test]
    fn samples_follow_the_probabilities() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let mut counts = [0; 3];
        (0..1000)
            .for_each(|i| counts[sample(&logits, &PLAIN, (i as f64 + 0.5) / 1000.0) as usize] += 1);
        assert_eq!(counts, [500, 300, 200]);
    }

    #[test]
    fn top_k_and_top_p_exclude_improbable_tokens() {
        let logits = [0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()];
        let most = |sampling: Sampling| {
            (0..100).map(|i| sample(&logits, &sampling, i as f64 / 100.0)).max()
        };
        assert_eq!(most(Sampling { temperature: 0.0, ..PLAIN }), Some(1));
        assert_eq!(most(Sampling { top_k: Some(1), ..PLAIN }), Some(1));
        assert_eq!(most(Sampling { top_k: Some(2), ..PLAIN }), Some(2));
        let never_zero = |sampling: Sampling| {
            (0..100).all(|i| sample(&logits, &sampling, i as f64 / 100.0) != 0)
        };
        assert!(never_zero(Sampling { top_p: Some(0.79), ..PLAIN }));
        assert!(!never_zero(Sampling { top_p: Some(0.81), ..PLAIN }));
    }
}
