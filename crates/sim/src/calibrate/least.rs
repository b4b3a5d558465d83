//! Non-negative least squares of relative errors: time is a sum of parts, and no part is negative.

/// The non-negative weights for which the weighted sums of parts are closest to the measurements; each row is (parts,
/// measured). There are few parts, so every subset of nonzero weights is tried.
pub fn weights<const N: usize>(rows: &[([f64; N], f64)]) -> [f64; N] {
    // Parts differ by orders of magnitude, so each is scaled by its maximum.
    let relative = |(parts, measured): &([f64; N], f64)| parts.map(|part| part / measured);
    let rows: Vec<[f64; N]> = rows.iter().map(relative).collect();
    let largest: [f64; N] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at]).fold(f64::MIN_POSITIVE, f64::max));
    let rows: Vec<[f64; N]> =
        rows.iter().map(|row| std::array::from_fn(|at| row[at] / largest[at])).collect();
    let off = |weights: &[f64; N]| -> f64 {
        let sum = |row: &[f64; N]| row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>();
        rows.iter().map(|row| (sum(row) - 1.0).powi(2)).sum()
    };
    let mut best = [0.0; N];
    for chosen in 1..1u32 << N {
        let found = solved(&rows, chosen);
        if found.iter().all(|weight| *weight >= 0.0) && off(&found) < off(&best) {
            best = found;
        }
    }
    std::array::from_fn(|at| best[at] / largest[at])
}

/// Weights of the chosen parts by the normal equations; the others are zero.
fn solved<const N: usize>(rows: &[[f64; N]], chosen: u32) -> [f64; N] {
    let on = |at: usize| chosen >> at & 1 == 1;
    let mut matrix = [[0.0; N]; N];
    let mut right = [0.0; N];
    for i in 0..N {
        if !on(i) {
            matrix[i][i] = 1.0;
            continue;
        }
        right[i] = rows.iter().map(|row| row[i]).sum();
        for j in (0..N).filter(|j| on(*j)) {
            matrix[i][j] = rows.iter().map(|row| row[i] * row[j]).sum();
        }
    }
    // Gauss-Jordan elimination. Linearly dependent parts give a NaN weight, which is never chosen.
    for i in 0..N {
        let pivot = (i..N).max_by(|a, b| matrix[*a][i].abs().total_cmp(&matrix[*b][i].abs()));
        let pivot = pivot.unwrap_or(i);
        matrix.swap(i, pivot);
        right.swap(i, pivot);
        let scale = matrix[i][i];
        matrix[i] = matrix[i].map(|number| number / scale);
        right[i] /= scale;
        for j in (0..N).filter(|j| *j != i) {
            let times = matrix[j][i];
            let own = matrix[i];
            matrix[j] = std::array::from_fn(|at| matrix[j][at] - times * own[at]);
            right[j] -= times * right[i];
        }
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_recovered() {
        let of = |a: f64, b: f64| ([a, b, 1.0], 2.0 * a + 3e-6 * b + 0.5);
        let found = weights(&[of(1.0, 1e6), of(5.0, 1e5), of(2.0, 3e7), of(0.1, 1e3)]);
        for (found, wanted) in found.into_iter().zip([2.0, 3e-6, 0.5]) {
            assert!((found / wanted - 1.0).abs() < 1e-6, "{found} {wanted}");
        }
    }

    #[test]
    fn a_negative_weight_becomes_zero() {
        let of = |a: f64, b: f64| ([a, b], 2.0 * a - 0.1 * b);
        let found = weights(&[of(1.0, 1.0), of(2.0, 1.0), of(4.0, 3.0)]);
        assert_eq!(found[1], 0.0);
        assert!(found[0] > 1.8 && found[0] < 2.0, "{found:?}");
    }
}
