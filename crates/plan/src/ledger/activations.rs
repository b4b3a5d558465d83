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
                kept.backward(&mut usage, recompute != Recompute::Selective, *later);
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
    /// The wide part of shared experts.
    shared: usize,
    /// What weight gradients that are put off need beside `out`, in the order of the backward pass.
    later: Later,
}

/// All of it in the compute type, but for the router's.
struct Later {
    /// The gradient of the feed-forward's output and its activation; those of experts with rows of their own.
    down: usize,
    /// The gradient before the activation, and the input. Of experts less what `inner` had of it.
    up: usize,
    /// The router's, with the input of all tokens.
    router: usize,
    /// As `down` and `up`, of shared experts: their input is the router's.
    shared: [usize; 2],
    /// The gradient of the attention's output.
    out: usize,
    /// Those of q, k and v, and the input.
    qkv: usize,
}

impl Kept {
    fn of(plan: &Plan, part: &Part) -> Kept {
        let (shape, layout) = (&plan.model.on_rank(&part.mesh, part.coord), &plan.layout);
        let bytes = plan.precision.compute.bytes();
        let tokens = plan.train.micro_batch * plan.data.seq / layout.context;
        let rows = if layout.sequence { tokens / layout.tensor } else { tokens };
        let norm = if shape.family == Family::Gpt2 { 2 } else { 1 };
        // Neighbours deal out heads; key heads that are too few go to several.
        let ulysses = part.mesh.ulysses;
        let key_heads = (shape.kv_heads / ulysses).max(1) * ulysses;
        let qkv = (shape.heads + 2 * key_heads) * shape.head_dim;
        let of_tokens = |cols: usize| bytes * tokens * cols;
        let dense = Kept {
            stream: bytes * rows * shape.dim,
            stats: 4 * rows * norm,
            attention: of_tokens(qkv) + 4 * tokens * shape.heads,
            out: of_tokens(shape.attention_dim()),
            routed: 0,
            inner: of_tokens(before(shape)),
            shared: 0,
            later: Later {
                down: of_tokens(shape.dim + shape.ffn),
                up: of_tokens(before(shape) + shape.dim),
                router: 0,
                shared: [0; 2],
                out: of_tokens(shape.dim),
                qkv: of_tokens(shape.qkv_dim() + shape.dim),
            },
        };
        match (shape.family, shape.moe) {
            (Family::Moe, Some(moe)) => {
                Mixture { plan, shape, moe, ranks: part.mesh.expert, tokens, bytes }.of(dense)
            }
            _ => dense,
        }
    }

    /// Beside the input.
    fn inside(&self, inner: bool) -> usize {
        let halves = 2 * self.stats + self.attention + self.out + self.stream + self.routed;
        halves + if inner { self.inner + self.shared } else { 0 }
    }

    /// What weight gradients that were put off hold.
    fn put_off(&self) -> usize {
        let Later { down, up, router, shared, out, qkv } = self.later;
        down + up + router + shared[0] + shared[1] + out + qkv
    }

    /// From the layer's output to its input; `inner` tells whether it has the wide part.
    fn backward(&self, usage: &mut Usage, inner: bool, later: bool) {
        if !later {
            return usage.give(self.inside(inner) + self.stream);
        }
        let of_inner = |bytes: usize| if inner { bytes } else { 0 };
        usage.take(self.later.down);
        usage.give(of_inner(self.inner));
        usage.take(self.later.up);
        usage.take(self.later.router);
        usage.take(self.later.shared[0]);
        usage.give(of_inner(self.shared));
        usage.take(self.later.shared[1]);
        // The norm's statistics, and the stream between the halves.
        usage.give(self.routed + self.stats + self.stream);
        usage.take(self.later.out);
        usage.give(self.attention);
        usage.take(self.later.qkv);
        usage.give(self.stats + self.stream);
    }
}

/// Columns of the wide part before its activation.
fn before(shape: &Shape) -> usize {
    if shape.family == Family::Gpt2 { shape.ffn } else { 2 * shape.ffn }
}

/// Experts in the place of the wide part.
struct Mixture<'a> {
    plan: &'a Plan,
    shape: &'a Shape,
    moe: Moe,
    /// Among which they are dealt out.
    ranks: usize,
    tokens: usize,
    bytes: usize,
}

impl Mixture<'_> {
    /// What is kept where a dense layer would keep `dense`.
    fn of(&self, dense: Kept) -> Kept {
        let Mixture { moe, tokens, bytes, .. } = *self;
        let (dim, ffn) = (self.shape.dim, self.shape.ffn);
        let of_tokens = |cols: usize| bytes * tokens * cols;
        let of_rows = |cols: usize| bytes * self.rows() * cols;
        // What has come from elsewhere is kept; what is here can be gathered again.
        let input = if self.ranks > 1 { of_rows(dim) } else { 0 };
        let shared = moe.shared * ffn;
        let of_shared = if shared > 0 { of_tokens(dim + shared) } else { 0 };
        Kept {
            routed: self.routed(),
            inner: of_rows(2 * ffn) + input,
            shared: of_tokens(2 * shared),
            later: Later {
                down: of_rows(dim + ffn),
                up: of_rows(2 * ffn + dim),
                router: 4 * tokens * moe.experts + of_tokens(dim),
                shared: [of_shared, of_tokens(2 * shared)],
                ..dense.later
            },
            ..dense
        }
    }

    /// Rows that come to the experts here: as many as are sent, when they are evenly used.
    fn rows(&self) -> usize {
        let Mixture { moe, plan, .. } = *self;
        let slots = self.tokens * moe.top_k;
        let Some(factor) = moe.capacity else { return slots };
        let of_sequence = (factor * (plan.data.seq * moe.top_k) as f64 / moe.experts as f64).ceil();
        slots.min(plan.train.micro_batch * moe.experts * (of_sequence as usize).max(1))
    }

    /// Probabilities and their log-sum; choice, weight, order and place of each slot; where experts begin, and
    /// those that are here; the slope of their balance loss.
    fn routed(&self) -> usize {
        let Moe { experts, top_k, .. } = self.moe;
        let scopes = match self.moe.balance {
            _ if self.moe.aux_loss == 0.0 => 0,
            Balance::Sequence => self.plan.train.micro_batch,
            Balance::Batch => 1,
        };
        let here = if self.ranks > 1 { experts / self.ranks + 1 } else { 0 };
        4 * (self.tokens * (experts + 1 + 4 * top_k) + experts + 1 + here + scopes * experts)
    }
}
