//! Text from a model, token by token, with the keys and values of what was said before kept in a cache.

use lockstep_kernels::{Attention, Device, Dtype, Tag, Tensor, View};
use lockstep_plan::context::Run;

use crate::attention::AttentionPart;
use crate::stream::add_projection;
use crate::{Ctx, Groups, Model, Weights};

/// Keys and values of one sequence, layer by layer.
pub struct Cache {
    layers: Vec<(Tensor, Tensor)>, // keys and values, each (seq, kv_heads * head_dim)
    len: usize,
    /// Text is made by one rank.
    groups: Groups,
}

impl Cache {
    pub fn new(device: &Device, model: &Model, dtype: Dtype) -> Cache {
        let layers = model.stages.iter().flat_map(|stage| &stage.layers);
        let layers = layers.map(|layer| {
            let part = &layer.attention;
            let cols = part.kv_heads * part.head_dim;
            let room = || device.empty(model.seq, cols, dtype, Tag::Buffers);
            (room(), room())
        });
        let layers = layers.collect();
        Cache { layers, len: 0, groups: Groups::alone() }
    }

    /// Tokens it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl Model {
    /// The logits after `ids`, which follow what the cache holds and are added to it.
    ///
    /// # Panics
    /// When there is nothing to follow, or it becomes longer than the model's sequences.
    pub fn extend(
        &self,
        device: &Device,
        weights: &Weights,
        cache: &mut Cache,
        ids: &[u32],
        dtype: Dtype,
    ) -> Vec<f32> {
        let (start, seq) = (cache.len, ids.len());
        assert!(seq > 0, "no token to follow");
        let most = self.seq;
        assert!(start + seq <= most, "{} tokens in a model of {most}", start + seq);
        let [stage] = &self.stages[..] else { panic!("text is made by a rank with a whole model") };
        let (Some(embed), Some(head)) = (&stage.embed, &stage.head) else {
            panic!("text is made by a rank with a whole model")
        };
        let Cache { layers, len, groups } = cache;
        let runs = [Run { start, len: seq }];
        let cx = Ctx {
            device,
            groups,
            dtype,
            batch: 1,
            runs: &runs,
            dropout: None,
            share: 1.0,
            auxiliary: None,
            counting: false,
        };

        let mut x = embed.forward(&cx, weights.block(0), View::of(ids));
        for (index, layer) in stage.layers.iter().enumerate() {
            let (keys, values) = &mut layers[index];
            let block = weights.block(index + 1);
            x = extend_attention(&layer.attention, &cx, block, &x, keys, values, start);
            x = layer.feed_forward.forward(&cx, block, &x, false).0;
        }
        *len += seq;

        // Only the last token's successor is wanted.
        let mut last = device.empty(1, x.cols(), dtype, Tag::Buffers);
        device.copy(x.view().rows_of(seq - 1..seq), last.view_mut());
        let runs = [Run { start: start + seq - 1, len: 1 }];
        let cx = Ctx { runs: &runs, ..cx };
        let output = self.output(stage, head, weights);
        let logits = head.logits(&cx, weights.block(stage.blocks.end - 1), output, &last);
        let mut row = vec![0.0; logits.len()];
        device.read(logits.view(), &mut row);
        row
    }
}

fn extend_attention(
    part: &AttentionPart,
    cx: &Ctx<'_>,
    weights: View<'_>,
    x: &Tensor,
    keys: &mut Tensor,
    values: &mut Tensor,
    start: usize,
) -> Tensor {
    let device = cx.device;
    let (mut stats, mut normed) =
        (cx.kept_wide(x.rows(), part.norm.stats()), cx.scratch(x.rows(), x.cols()));
    part.norm.forward(device, weights, x.view(), normed.view_mut(), stats.view_mut());
    let mut qkv = cx.scratch(x.rows(), part.qkv.rows());
    device.matmul(part.qkv.forward(weights, normed.view(), qkv.view_mut()));

    let end = start + cx.seq();
    let new = Attention { q_start: start, k_start: start, ..part.square(cx) };
    if let Some(rope) = &part.rope {
        device.rope(rope, &new, qkv.view_mut());
    }
    let (q, kv) = (part.heads * part.head_dim, part.kv_heads * part.head_dim);
    device.copy_columns(qkv.view(), q, keys.view_mut().rows_of(start..end));
    device.copy_columns(qkv.view(), q + kv, values.view_mut().rows_of(start..end));

    let whole = Attention { k_len: end, k_start: 0, ..new };
    let (mut out, mut lse) = (cx.scratch(x.rows(), q), cx.kept_wide(part.heads, cx.seq()));
    let (keys, values) = (keys.view().rows_of(0..end), values.view().rows_of(0..end));
    device.attention_over(&whole, qkv.view(), keys, values, out.view_mut(), lse.view_mut());
    add_projection(cx, 0, &part.out, weights, out.view(), x)
}

/// How the next token is drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Zero takes the likeliest.
    pub temperature: f32,
    /// Only from this many of the likeliest.
    pub top_k: Option<usize>,
    /// Only from the likeliest that together reach this probability.
    pub top_p: Option<f32>,
}

/// Draws a token; `uniform` is a random number in [0, 1).
pub fn sample(logits: &[f32], sampling: &Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Descending, ties by the lower number, so that a seed always gives the same text.
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
    let mut kept = 0;
    let mut sum = 0.0;
    while kept < weights.len() && (kept == 0 || sum < mass) {
        sum += weights[kept];
        kept += 1;
    }
    let mut left = uniform * sum;
    for (id, weight) in order.iter().zip(&weights[..kept]) {
        left -= weight;
        if left < 0.0 {
            return *id;
        }
    }
    order[kept - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: None };

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let mut counts = [0; 3];
        (0..1000)
            .for_each(|i| counts[sample(&logits, &PLAIN, (i as f64 + 0.5) / 1000.0) as usize] += 1);
        assert_eq!(counts, [500, 300, 200]);
    }

    #[test]
    fn limits_cut_the_tail() {
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
