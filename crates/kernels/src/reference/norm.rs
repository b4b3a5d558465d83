//! LayerNorm and RMSNorm.

/// `(x - mean) / √(variance + eps) * gain + bias` for every row.
pub fn layer_forward(x: &[f64], gain: &[f64], bias: &[f64], eps: f64) -> Vec<f64> {
    rows(x, gain.len(), |row| {
        let (mean, rstd) = layer_stats(row, eps);
        (0..row.len()).map(|j| (row[j] - mean) * rstd * gain[j] + bias[j]).collect()
    })
}

/// Mean and 1 / √(variance + eps) of a row.
pub fn layer_stats(row: &[f64], eps: f64) -> (f64, f64) {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// Returns (dx, dgain, dbias).
pub fn layer_backward(
    x: &[f64],
    gain: &[f64],
    eps: f64,
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let dim = gain.len();
    let (mut dx, mut dgain, mut dbias) = (vec![], vec![0.0; dim], vec![0.0; dim]);
    for (row, dy) in x.chunks_exact(dim).zip(dy.chunks_exact(dim)) {
        let (mean, rstd) = layer_stats(row, eps);
        let hat = |j: usize| (row[j] - mean) * rstd;
        let direct = (0..dim).map(|j| dy[j] * gain[j]).sum::<f64>() / dim as f64;
        let along = (0..dim).map(|j| dy[j] * gain[j] * hat(j)).sum::<f64>() / dim as f64;
        for j in 0..dim {
            dx.push(rstd * (dy[j] * gain[j] - direct - hat(j) * along));
            dgain[j] += dy[j] * hat(j);
            dbias[j] += dy[j];
        }
    }
    (dx, dgain, dbias)
}

/// `x / √(mean of squares + eps) * gain` for every row.
pub fn rms_forward(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    rows(x, gain.len(), |row| {
        let rstd = rms_stats(row, eps);
        (0..row.len()).map(|j| row[j] * rstd * gain[j]).collect()
    })
}

/// 1 / √(mean of squares + eps) of a row.
pub fn rms_stats(row: &[f64], eps: f64) -> f64 {
    1.0 / (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + eps).sqrt()
}

/// Returns (dx, dgain).
pub fn rms_backward(x: &[f64], gain: &[f64], eps: f64, dy: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let dim = gain.len();
    let (mut dx, mut dgain) = (vec![], vec![0.0; dim]);
    for (row, dy) in x.chunks_exact(dim).zip(dy.chunks_exact(dim)) {
        let rstd = rms_stats(row, eps);
        let along = (0..dim).map(|j| dy[j] * gain[j] * row[j] * rstd).sum::<f64>() / dim as f64;
        for j in 0..dim {
            dx.push(rstd * (dy[j] * gain[j] - row[j] * rstd * along));
            dgain[j] += dy[j] * row[j] * rstd;
        }
    }
    (dx, dgain)
}

fn rows(x: &[f64], dim: usize, one: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    x.chunks_exact(dim).flat_map(one).collect()
}
