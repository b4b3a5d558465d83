//! The largest magnitudes, by sorting.

/// The places of the `k` largest magnitudes, of equal ones the first; in ascending order. NaN is the largest.
pub fn places(x: &[f64], k: usize) -> Vec<usize> {
    let magnitude = |i: usize| if x[i].is_nan() { f64::INFINITY } else { x[i].abs() };
    let mut places: Vec<usize> = (0..x.len()).collect();
    places.sort_by(|&a, &b| {
        let by_size = magnitude(b).total_cmp(&magnitude(a));
        x[b].is_nan().cmp(&x[a].is_nan()).then(by_size).then(a.cmp(&b))
    });
    places.truncate(k);
    places.sort_unstable();
    places
}
