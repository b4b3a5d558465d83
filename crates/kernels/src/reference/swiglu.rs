//! SwiGLU: from rows of gate and up, (rows, 2f), to `silu(gate) * up`, (rows, f).

pub fn forward(gate_up: &[f64], f: usize) -> Vec<f64> {
    gate_up.chunks_exact(2 * f).flat_map(|row| (0..f).map(|j| silu(row[j]) * row[f + j])).collect()
}

/// Gradient of `gate_up`.
pub fn backward(gate_up: &[f64], f: usize, dy: &[f64]) -> Vec<f64> {
    let mut d = vec![0.0; gate_up.len()];
    for (row, (d, dy)) in d.chunks_exact_mut(2 * f).zip(dy.chunks_exact(f)).enumerate() {
        let row = &gate_up[row * 2 * f..][..2 * f];
        for j in 0..f {
            let s = 1.0 / (1.0 + (-row[j]).exp());
            d[j] = dy[j] * row[f + j] * s * (1.0 + row[j] * (1.0 - s));
            d[f + j] = dy[j] * silu(row[j]);
        }
    }
    d
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}
