//! Activations that blocks save for their backward passes, allocated and freed in the order of `model`.

use super::Usage;
use crate::config::Recompute;
use crate::model::{Balance, Family, Moe, Part, Shape};
use crate::passes::PassEvent;
use crate::plan::Plan;
use lockstep_types::DeviceType;

/// Peak bytes of activations, on the device and in host memory.
pub(super) fn peaks(
    plan: &Plan,
    part: &Part,
    passes: impl Iterator<Item = PassEvent>,
) -> (usize, usize) {
    let (saved, recompute) = (LayerActivations::of(plan, part), plan.layout.recompute);
    let (mut usage, mut host) = (Usage::default(), Usage::default());
    let moves = |block: usize| plan.layout.offload.activations() && part.offloads(block);
    let saved_bytes = saved.stream
        + match recompute {
            Recompute::Full => 0,
            _ => saved.inside(recompute.saves_hidden()),
        };
    // Bytes that are being copied to the host.
    let mut leaving = 0;
    for pass in passes {
        match pass {
            PassEvent::Received { forward: true } | PassEvent::Embed { .. } => {
                usage.take(saved.stream)
            }
            // A sent message lives until it is received, which does not depend on this rank's passes.
            PassEvent::Sent { forward: true } => usage.give(saved.stream),
            PassEvent::Forward { block } => {
                let inside = saved.inside(recompute.saves_hidden());
                usage.take(inside + saved.stream);
                if recompute == Recompute::Full {
                    usage.give(inside);
                }
                usage.give(std::mem::take(&mut leaving));
                if moves(block) {
                    leaving = saved_bytes;
                    host.take(saved_bytes);
                }
            }
            // The head's input.
            PassEvent::LossAndBackward { .. } => usage.give(saved.stream),
            PassEvent::Backward { block, deferred } => {
                // Its own activations have arrived; those of the layer before are fetched ahead.
                if moves(block) {
                    host.give(saved_bytes);
                }
                if block.checked_sub(1).is_some_and(moves) && part.same_stage(block - 1, block) {
                    usage.take(saved_bytes);
                }
                if recompute == Recompute::Full {
                    usage.take(saved.inside(true));
                }
                saved.backward(&mut usage, recompute != Recompute::Selective, deferred);
            }
            PassEvent::Weights { .. } => usage.give(saved.out + saved.deferred()),
            PassEvent::Received { .. }
            | PassEvent::Sent { .. }
            | PassEvent::EmbedBackward { .. } => {}
        }
    }
    (usage.peak, host.peak)
}

/// Bytes of the scale of an fp8 matrix, and its inverse.
const FP8_SCALE: usize = 8;

/// Bytes that a layer saves for one micro-batch.
struct LayerActivations {
    /// (rows, dim): the layer's input; the residual stream between its halves has the same size.
    stream: usize,
    /// Statistics of one norm.
    stats: usize,
    /// Saved output of one norm.
    normed: usize,
    /// Norms whose output is saved. The others feed linear layers in fp8.
    saved_norms: usize,
    /// Inputs of linear layers in fp8, with their scales.
    fp8: usize,
    /// Whether the backward pass gathers it from the ranks of the tensor axis.
    gathers: bool,
    /// q, k, v and the log-sum-exp.
    attention: usize,
    /// The heads' output.
    out: usize,
    /// The router's output.
    routed: usize,
    /// Input and saved output of the feed-forward's activation function, and rows that experts received from other ranks.
    inner: usize,
    /// Input and saved output of the shared experts' activation function.
    shared: usize,
    /// Part of `inner` and of `shared` that deferred weight gradients keep: hidden values after the activation.
    kept: [usize; 2],
    /// Part of `routed` that deferred weight gradients keep: the first row of each expert.
    groups: usize,
    /// Saved for deferred weight gradients, in addition to `out`.
    later: Deferred,
}

/// Bytes that deferred weight gradients need, in the order of the backward pass. All in the compute type except the
/// router's.
struct Deferred {
    /// Gradient of the feed-forward's output, and its activation.
    down: usize,
    /// Gradient before the activation function, and the input.
    up: usize,
    /// Gradient of the router's logits, and the input of all tokens.
    router: usize,
    /// As `down` and `up`, for shared experts. Their input is the router's.
    shared: [usize; 2],
    /// Gradient of the attention's output.
    out: usize,
    /// Gradients of q, k and v, and the input.
    qkv: usize,
}

impl LayerActivations {
    fn of(plan: &Plan, part: &Part) -> LayerActivations {
        let (shape, layout) = (&plan.model.on_rank(&part.mesh, part.coord), &plan.layout);
        let bytes = plan.precision.compute.bytes();
        let tokens = plan.train.micro_batch * plan.data.seq / layout.context;
        let rows = if layout.sequence { tokens / layout.tensor } else { tokens };
        let norm = if shape.family == Family::Gpt2 { 2 } else { 1 };
        // Ulysses distributes heads; if there are too few key heads, several ranks get the same one.
        let ulysses = part.mesh.ulysses;
        let key_heads = (shape.kv_heads / ulysses).max(1) * ulysses;
        let qkv = (shape.heads + 2 * key_heads) * shape.head_dim;
        let of_tokens = |cols: usize| bytes * tokens * cols;
        let keeps = keeps_cheap(plan.device.kind, layout.recompute);
        let fp8 = plan.precision.fp8.is_on();
        let after = if keeps && !fp8 { shape.ffn } else { 0 };
        let of_fp8 = |cols: usize| if keeps && fp8 { tokens * cols + FP8_SCALE } else { 0 };
        let of_attention = of_fp8(shape.dim) + of_fp8(shape.attention_dim());
        let dense = LayerActivations {
            stream: bytes * rows * shape.dim,
            stats: 4 * rows * norm,
            normed: if keeps { bytes * rows * shape.dim } else { 0 },
            saved_norms: if fp8 { 0 } else { 2 },
            fp8: of_attention + of_fp8(shape.dim) + of_fp8(shape.ffn),
            gathers: layout.sequence,
            attention: of_tokens(qkv) + 4 * tokens * shape.heads,
            out: of_tokens(shape.attention_dim()),
            routed: 0,
            inner: of_tokens(before(shape) + after),
            shared: 0,
            kept: [of_tokens(after), 0],
            groups: 0,
            later: Deferred {
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
                // Experts are not multiplied in fp8.
                let saved_norms = dense.saved_norms.max(1);
                let dense = LayerActivations { saved_norms, fp8: of_attention, ..dense };
                Mixture { plan, shape, moe, ranks: part.mesh.expert, tokens, bytes }.of(dense)
            }
            _ => dense,
        }
    }

    /// Everything but the layer's input.
    fn inside(&self, inner: bool) -> usize {
        let norms = 2 * self.stats + self.saved_norms * self.normed;
        let halves = norms + self.fp8 + self.attention + self.out + self.stream + self.routed;
        halves + if inner { self.inner + self.shared } else { 0 }
    }

    /// Everything that deferred weight gradients hold.
    fn deferred(&self) -> usize {
        let Deferred { down, up, router, shared, out, qkv } = self.later;
        down + up + router + shared[0] + shared[1] + out + qkv + self.groups
    }

    /// The backward pass of a layer; `inner` says whether the input of its activation function was saved.
    fn backward(&self, usage: &mut Usage, inner: bool, deferred: bool) {
        if !deferred {
            return usage.give(self.inside(inner) + self.stream);
        }
        let of_inner = |bytes: usize| if inner { bytes } else { 0 };
        let [kept, kept_shared] = self.kept;
        // Deferred gradients keep the outputs of norms, or copies of them that have the rows of all ranks.
        let again = if self.gathers { 0 } else { self.normed };
        let gathered = self.normed - again;
        let (up, router) = match self.later.router {
            0 => (self.later.up - again, 0),
            // Experts get copies of their rows.
            router => (self.later.up, router - again),
        };
        let gathers_first = router > 0;
        usage.give(if gathers_first { gathered } else { 0 });
        usage.take(self.later.down - kept);
        usage.give(of_inner(self.inner - kept));
        usage.give(if gathers_first { 0 } else { gathered });
        usage.take(up);
        usage.take(router);
        usage.take(self.later.shared[0] - kept_shared);
        usage.give(of_inner(self.shared - kept_shared));
        usage.take(self.later.shared[1]);
        // The norm's statistics, and the residual stream between the halves.
        usage.give(self.routed - self.groups + self.stats + self.stream);
        usage.take(self.later.out);
        usage.give(self.attention);
        usage.give(gathered);
        usage.take(self.later.qkv - again);
        usage.give(self.stats + self.stream);
    }
}

/// Whether a layer also saves values that are cheap to compute again: the outputs of its norms, and the hidden values of
/// a dense feed-forward after the activation. They are cheap next to the multiplies of a CPU, but not of a GPU.
pub fn keeps_cheap(device: DeviceType, recompute: Recompute) -> bool {
    device == DeviceType::Cuda && recompute == Recompute::None
}

/// Columns of the activation function's input.
fn before(shape: &Shape) -> usize {
    if shape.family == Family::Gpt2 { shape.ffn } else { 2 * shape.ffn }
}

/// A mixture of experts in place of the feed-forward.
struct Mixture<'a> {
    plan: &'a Plan,
    shape: &'a Shape,
    moe: Moe,
    /// Ranks among which the experts are distributed.
    ranks: usize,
    tokens: usize,
    bytes: usize,
}

impl Mixture<'_> {
    /// The activations of a layer whose dense equivalent saves `dense`.
    fn of(&self, dense: LayerActivations) -> LayerActivations {
        let Mixture { moe, tokens, bytes, .. } = *self;
        let (dim, ffn) = (self.shape.dim, self.shape.ffn);
        let of_tokens = |cols: usize| bytes * tokens * cols;
        let of_rows = |cols: usize| bytes * self.rows() * cols;
        // Rows from other ranks are saved; local rows can be gathered again.
        let input = if self.ranks > 1 { of_rows(dim) } else { 0 };
        let shared = moe.shared * ffn;
        let keeps = keeps_cheap(self.plan.device.kind, self.plan.layout.recompute);
        let after = if keeps { shared } else { 0 };
        let of_shared = if shared > 0 { of_tokens(dim + shared) } else { 0 };
        LayerActivations {
            routed: self.routed(),
            inner: of_rows(2 * ffn) + input,
            shared: of_tokens(2 * shared + after),
            kept: [0, of_tokens(after)],
            groups: 4 * (moe.experts / self.ranks + 1),
            later: Deferred {
                down: of_rows(dim + ffn),
                up: of_rows(2 * ffn + dim),
                router: 4 * tokens * moe.experts + of_tokens(dim),
                shared: [of_shared, of_tokens(2 * shared)],
                ..dense.later
            },
            ..dense
        }
    }

    /// Rows that this rank's experts receive if all experts are used evenly.
    fn rows(&self) -> usize {
        let Mixture { moe, plan, .. } = *self;
        let slots = self.tokens * moe.top_k;
        let Some(factor) = moe.capacity else { return slots };
        let of_sequence = (factor * (plan.data.seq * moe.top_k) as f64 / moe.experts as f64).ceil();
        slots.min(plan.train.micro_batch * moe.experts * (of_sequence as usize).max(1))
    }

    /// Probabilities and their log-sum; choice, weight, order and position of each slot; offsets of all experts and of
    /// the local ones; slopes of the balance loss.
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
