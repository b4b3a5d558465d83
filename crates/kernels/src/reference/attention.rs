//! Causal attention with the full score matrix, one head at a time.

use crate::AttentionShape;

/// q (batch, q_len, heads, head_dim), k and v (batch, k_len, kv_heads, head_dim).
pub struct Inputs {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

/// out (batch, q_len, heads, head_dim), lse (batch, heads, q_len).
pub struct Outputs {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

pub fn forward(shape: &AttentionShape, inputs: &Inputs) -> Outputs {
    let AttentionShape { batch, heads, head_dim, q_len, k_len, .. } = *shape;
    let mut out = vec![0.0; batch * q_len * heads * head_dim];
    let mut lse = vec![f64::NEG_INFINITY; batch * heads * q_len];
    for_each_head(shape, |b, h| {
        for i in 0..q_len {
            let scores = scores(shape, inputs, b, h, i);
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if top == f64::NEG_INFINITY {
                continue;
            }
            let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            lse[(b * heads + h) * q_len + i] = top + sum.ln();
            for (j, score) in scores.iter().enumerate().take(k_len) {
                let weight = (score - top).exp() / sum;
                for d in 0..head_dim {
                    out[query(shape, b, i, h) + d] += weight * inputs.v[key(shape, b, j, h) + d];
                }
            }
        }
    });
    Outputs { out, lse }
}

/// dq, dk and dv, with the layout of q, k and v.
pub fn backward(
    shape: &AttentionShape,
    inputs: &Inputs,
    outputs: &Outputs,
    dout: &[f64],
) -> Inputs {
    let AttentionShape { heads, head_dim, q_len, k_len, scale, .. } = *shape;
    let zeros = |like: &Vec<f64>| vec![0.0; like.len()];
    let mut grads = Inputs { q: zeros(&inputs.q), k: zeros(&inputs.k), v: zeros(&inputs.v) };
    for_each_head(shape, |b, h| {
        for i in 0..q_len {
            let at = query(shape, b, i, h);
            let scores = scores(shape, inputs, b, h, i);
            let lse = outputs.lse[(b * heads + h) * q_len + i];
            let delta: f64 = (0..head_dim).map(|d| dout[at + d] * outputs.out[at + d]).sum();
            for (j, score) in scores.iter().enumerate().take(k_len).filter(|(_, s)| s.is_finite()) {
                let from = key(shape, b, j, h);
                let weight = (score - lse).exp();
                let dweight: f64 = (0..head_dim).map(|d| dout[at + d] * inputs.v[from + d]).sum();
                let dscore = weight * (dweight - delta) * f64::from(scale);
                for d in 0..head_dim {
                    grads.v[from + d] += weight * dout[at + d];
                    grads.q[at + d] += dscore * inputs.k[from + d];
                    grads.k[from + d] += dscore * inputs.q[at + d];
                }
            }
        }
    });
    grads
}

/// Scores of one query; -inf for masked keys.
fn scores(shape: &AttentionShape, inputs: &Inputs, b: usize, h: usize, i: usize) -> Vec<f64> {
    let at = query(shape, b, i, h);
    let score = |j| {
        if shape.k_start + j > shape.q_start + i {
            return f64::NEG_INFINITY;
        }
        let from = key(shape, b, j, h);
        let dot: f64 = (0..shape.head_dim).map(|d| inputs.q[at + d] * inputs.k[from + d]).sum();
        dot * f64::from(shape.scale)
    };
    (0..shape.k_len).map(score).collect()
}

fn for_each_head(shape: &AttentionShape, mut work: impl FnMut(usize, usize)) {
    for b in 0..shape.batch {
        for h in 0..shape.heads {
            work(b, h);
        }
    }
}

fn query(shape: &AttentionShape, b: usize, i: usize, h: usize) -> usize {
    ((b * shape.q_len + i) * shape.heads + h) * shape.head_dim
}

fn key(shape: &AttentionShape, b: usize, j: usize, h: usize) -> usize {
    ((b * shape.k_len + j) * shape.kv_heads + h / shape.group()) * shape.head_dim
}
