//! Reductions over whole tensors and over rows.

pub fn sum_of_squares(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}

pub fn count_non_finite(x: &[f64]) -> u64 {
    x.iter().filter(|x| !x.is_finite()).count() as u64
}

pub fn column_sums(x: &[f64], n: usize) -> Vec<f64> {
    (0..n).map(|column| x.iter().skip(column).step_by(n).sum()).collect()
}
