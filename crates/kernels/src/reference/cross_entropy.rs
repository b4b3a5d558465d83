//! Cross-entropy of logits against targets.

use crate::IGNORED;

/// `ln Σ e^logit - target logit + z ln² Σ e^logit` of each row.
pub fn losses(logits: &[f64], targets: &[u32], z_loss: f64) -> Vec<f64> {
    let rows = logits.chunks_exact(width(logits, targets)).zip(targets);
    rows.map(|(row, &target)| {
        if target == IGNORED {
            return 0.0;
        }
        log_sum(row) - row[target as usize] + z_loss * log_sum(row).powi(2)
    })
    .collect()
}

/// Gradient of the sum of the losses, times `scale`.
pub fn backward(logits: &[f64], targets: &[u32], scale: f64, z_loss: f64) -> Vec<f64> {
    let mut d = vec![];
    for (row, &target) in logits.chunks_exact(width(logits, targets)).zip(targets) {
        let all = log_sum(row);
        for (column, logit) in row.iter().enumerate() {
            let p = (logit - all).exp();
            let own = if column == target as usize { 1.0 } else { 0.0 };
            let gradient = p * (1.0 + 2.0 * z_loss * all) - own;
            d.push(if target == IGNORED { 0.0 } else { scale * gradient });
        }
    }
    d
}

fn width(logits: &[f64], targets: &[u32]) -> usize {
    (logits.len() / targets.len().max(1)).max(1)
}

fn log_sum(row: &[f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln() + max
}
