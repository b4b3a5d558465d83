//! What a rank sends for the attention of one layer and micro-batch, by formula. The tests of the exchange hold
//! it against the bytes that groups count.

/// What a rank of the context brings to the attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Brought {
    /// Of all sequences of the micro-batch, those that this rank holds.
    pub tokens: usize,
    /// Of this rank, after the tensor axis has cut them.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Of a number in the compute type.
    pub bytes: usize,
}

/// Bytes that one rank sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sent {
    pub forward: u64,
    pub backward: u64,
}

/// Both exchanges: ulysses among neighbours, and the ring of what they hold together, with the heads that a
/// rank then has.
pub fn sent((ulysses, ring): (usize, usize), brought: &Brought) -> Sent {
    let dealt = ulysses_sent(ulysses, brought);
    let round = ring_sent(ring, &dealt_out(ulysses, brought));
    Sent { forward: dealt.forward + round.forward, backward: dealt.backward + round.backward }
}

/// What a rank attends with when neighbours have dealt out their heads.
fn dealt_out(ulysses: usize, brought: &Brought) -> Brought {
    Brought {
        tokens: brought.tokens * ulysses,
        heads: brought.heads / ulysses,
        kv_heads: (brought.kv_heads / ulysses).max(1),
        ..*brought
    }
}

/// Forward, every block of keys and values goes to r-1 others, each rank passing one on at a time: r-1 messages.
/// Backward they go again, and their gradients follow them in f32 and home: 2(r-1) messages.
pub fn ring_sent(ring: usize, brought: &Brought) -> Sent {
    let Brought { tokens, kv_heads, head_dim, bytes, .. } = *brought;
    let block = (tokens * 2 * kv_heads * head_dim) as u64;
    let steps = ring as u64 - 1;
    Sent { forward: steps * block * bytes as u64, backward: steps * block * (bytes as u64 + 4) }
}

/// (u-1)/u of what a rank holds: forward of q, k, v and of the output, backward of their gradients and of a
/// number in f32 per head. Where there are fewer key heads than ranks, each goes to all who need it.
pub fn ulysses_sent(ulysses: usize, brought: &Brought) -> Sent {
    let Brought { heads, kv_heads, head_dim, .. } = dealt_out(ulysses, brought);
    let to_each = (brought.tokens * (2 * heads + 2 * kv_heads) * head_dim * brought.bytes) as u64;
    let deltas = (brought.tokens * heads * 4) as u64;
    let others = ulysses as u64 - 1;
    Sent { forward: others * to_each, backward: others * (to_each + deltas) }
}
