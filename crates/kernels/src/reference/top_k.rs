//! The largest magnitudes, by sorting.

/// Indices of the `k` largest magnitudes in ascending order. Ties go to the lower index; NaN is the largest.
pub fn indices(x: &[f64], k: usize) -> Vec<usize> {
    let magnitude = |i: usize| if x[i].is_nan() { f64::INFINITY } else { x[i].abs() };
    let mut indices: Vec<usize> = (0..x.len()).collect();
    indices.sort_by(|&a, &b| {
        let by_size = magnitude(b).total_cmp(&magnitude(a));
        x[b].is_nan().cmp(&x[a].is_nan()).then(by_size).then(a.cmp(&b))
    });
    indices.truncate(k);
    indices.sort_unstable();
    indices
}
