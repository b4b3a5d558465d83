//! What blocks keep for their backward passes: taken and given back moment by moment, in the order of `model`.

use super::Usage;
use crate::config::Recompute;
use crate::model::{Balance, Family, Moe, Part, Shape};
use crate::passes::Moment;
use crate::plan::Plan;

/// Bytes of activations at most.
pub(super) fn peak(plan: &Plan, part: &Part, moments: &[Moment]) -> usize {
    let (kept, recompute) = (Kept::of(plan, part), plan.layout.recompute);
    let mut usage = Usage::default();
    for moment in moments {
        match moment {
            Moment::Received { forward: true } | Moment::Embed { .. } => usage.take(kept.stream),
            // Sent, it lives as long as the sending takes, which is no matter of blocks.
            Moment::Passed { forward: true } => usage.give(kept.stream),
            Moment::Forward { .. } => {
                let inside = kept.inside(recompute == Recompute::None);
                usage.take(inside + kept.stream);
                if recompute == Recompute::Full {
                    usage.give(inside);
                }
            }
            // The head's input.
            Moment::Turn { .. } => usage.give(kept.stream),
            Moment::Backward { later, .. } => {
                if recompute == Recompute::Full {
                    usage.take(kept.inside(true));
                }
                let inner = if recompute == Recompute::Selective { 0 } else { kept.inner };
                kept.backward(&mut usage, inner, *later);
            }
            Moment::Weights { .. } => usage.give(kept.out + kept.put_off()),
            Moment::Received { .. } | Moment::Passed { .. } | Moment::EmbedBackward { .. } => {}
        }
    }
    usage.peak
}

/// Bytes that a layer keeps of one micro-batch.
struct Kept {
    /// (rows, dim): the layer's input, and the stream between its halves.
    stream: usize,
    /// Of one norm.
    stats: usize,
    /// q, k, v and the log-sum-exp.
    attention: usize,
    /// The heads' output.
    out: usize,
    /// What a router decided.
    routed: usize,
    /// The wide part before its activation, and rows that came to experts from elsewhere.
    inner: usize,
    /// What weight gradients that are put off need beside `out`, in the order of the backward pass.
    later: Later,
}

/// All of it in the compute type, but for the router's.
struct Later {
    /// The gradient of the feed-forward's output and its activation; those of experts with rows of their own.
    down: usize,
    /// The gradient before the activation, and the input. Of experts less what `inner` had of it.
    up: usize,
    /// The router's, with the input of all; and the shared experts'.
    router: usize,
    /// The gradient of the attention's output.
    out: usize,
    /// Those of q, k and v, and the input.
    qkv: usize,
}

impl Kept {
    fn of(plan: &Plan, part: &Part) -> Kept {
        let (shape, layout) = (&part.shape, &plan.layout);
        let bytes = plan.precision.compute.bytes();
        let tokens = plan.train.micro_batch * plan.data.seq / layout.context;
        let rows = if layout.sequence { tokens / layout.tensor } else { tokens };
        let norm = if shape.family == Family::Gpt2 { 2 } else { 1 };
        // Neighbours deal out heads; key heads that are too few go to several.
        let ulysses = part.mesh.ulysses;
        let key_heads = (shape.kv_heads / ulysses).max(1) * ulysses;
        let qkv = (shape.heads + 2 * key_heads) * shape.head_dim;
        let of_tokens = |cols: usize| bytes * tokens * cols;
        let wide = Wide { plan, shape, experts: part.mesh.expert, tokens, bytes };
        let (routed, inner, [down, up, router]) = wide.kept();
        Kept {
            stream: bytes * rows * shape.dim,
            stats: 4 * rows * norm,
            attention: of_tokens(qkv) + 4 * tokens * shape.heads,
            out: of_tokens(shape.attention_dim()),
            routed,
            inner,
            later: Later {
                down,
                up,
                router,
                out: of_tokens(shape.dim),
                qkv: of_tokens(shape.qkv_dim() + shape.dim),
            },
        }
    }

    /// Beside the input.
    fn inside(&self, inner: bool) -> usize {
        let halves = 2 * self.stats + self.attention + self.out + self.stream + self.routed;
        halves + if inner { self.inner } else { 0 }
    }

    /// What weight gradients that were put off hold.
    fn put_off(&self) -> usize {
        let Later { down, up, router, out, qkv } = self.later;
        down + up + router + out + qkv
    }

    /// From the layer's output to its input; `inner` is what it has of the wide part.
    fn backward(&self, usage: &mut Usage, inner: usize, later: bool) {
        if !later {
            let all = self.inside(false) + inner + self.stream;
            return usage.give(all);
        }
        usage.take(self.later.down);
        usage.give(inner);
        usage.take(self.later.up);
        usage.take(self.later.router);
        // The norm's statistics, and the stream between the halves.
        usage.give(self.routed + self.stats + self.stream);
        usage.take(self.later.out);
        usage.give(self.attention);
        usage.take(self.later.qkv);
        usage.give(self.stats + self.stream);
    }
}

/// The wide part of a layer.
struct Wide<'a> {
    plan: &'a Plan,
    shape: &'a Shape,
    /// Ranks among which experts are dealt out.
    experts: usize,
    tokens: usize,
    bytes: usize,
}

impl Wide<'_> {
    /// What a router decided, the wide part, and what its weight gradients need when they are put off.
    fn kept(&self) -> (usize, usize, [usize; 3]) {
        let Wide { shape, tokens, bytes, .. } = *self;
        let (dim, ffn) = (shape.dim, shape.ffn);
        let before = if shape.family == Family::Gpt2 { ffn } else { 2 * ffn };
        let of_tokens = |cols: usize| bytes * tokens * cols;
        let (Family::Moe, Some(moe)) = (shape.family, shape.moe) else {
            let later = [of_tokens(dim + ffn), of_tokens(before + dim), 0];
            return (0, of_tokens(before), later);
        };
        let of_rows = |cols: usize| bytes * self.rows(moe) * cols;
        let (shared, travels) = (moe.shared * ffn, self.experts > 1);
        let input = if travels { of_rows(dim) } else { 0 };
        let inner = of_rows(2 * ffn) + input + of_tokens(2 * shared);
        // The gradient of the output is all tokens' for the shared experts, too.
        let of_shared = if shared > 0 { of_tokens(dim + 3 * shared) } else { 0 };
        let router = 4 * tokens * moe.experts + of_tokens(dim) + of_shared;
        let later = [of_rows(dim + ffn), of_rows(2 * ffn + dim), router];
        (self.routed(moe), inner, later)
    }

    /// Rows that come to the experts here: as many as are sent, when they are evenly used.
    fn rows(&self, moe: Moe) -> usize {
        let slots = self.tokens * moe.top_k;
        let Some(factor) = moe.capacity else { return slots };
        let sequence = (factor * (self.plan.data.seq * moe.top_k) as f64 / moe.experts as f64).ceil();
        slots.min(self.plan.train.micro_batch * moe.experts * (sequence as usize).max(1))
    }

    /// Probabilities and their log-sum; choice, weight, order and place of each slot; where experts begin, and
    /// those that are here; the slope of their balance loss.
    fn routed(&self, moe: Moe) -> usize {
        let scopes = match moe.balance {
            _ if moe.aux_loss == 0.0 => 0,
            Balance::Sequence => self.plan.train.micro_batch,
            Balance::Batch => 1,
        };
        let here = if self.experts > 1 { moe.experts / self.experts + 1 } else { 0 };
        let of_tokens = self.tokens * (moe.experts + 1 + 4 * moe.top_k);
        4 * (of_tokens + moe.experts + 1 + here + scopes * moe.experts)
    }
}
