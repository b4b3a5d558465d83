//! Bytes that a rank sends for the attention of one layer and micro-batch, by formula. Tests compare the formulas with
//! the bytes counted by the groups.

/// Attention inputs of one context rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttentionShard {
    /// Tokens of the micro-batch on this rank.
    pub tokens: usize,
    /// Query heads on this rank.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Bytes per number in the compute type.
    pub bytes: usize,
}

/// Bytes that one rank sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sent {
    pub forward: u64,
    pub backward: u64,
}

/// Total of Ulysses among neighbours and of the ring between their groups.
pub fn sent((ulysses, ring): (usize, usize), shard: &AttentionShard) -> Sent {
    let all_to_all = ulysses_sent(ulysses, shard);
    let ring = ring_sent(ring, &after_ulysses(ulysses, shard));
    Sent {
        forward: all_to_all.forward + ring.forward,
        backward: all_to_all.backward + ring.backward,
    }
}

/// The shard of a rank after the all-to-all of Ulysses: more tokens, fewer heads.
fn after_ulysses(ulysses: usize, shard: &AttentionShard) -> AttentionShard {
    AttentionShard {
        tokens: shard.tokens * ulysses,
        heads: shard.heads / ulysses,
        kv_heads: (shard.kv_heads / ulysses).max(1),
        ..*shard
    }
}

/// Forward: every block of keys and values visits the r-1 other ranks, one hop at a time; r-1 messages. Backward: the
/// same, followed by their f32 gradients; 2(r-1) messages.
pub fn ring_sent(ring: usize, shard: &AttentionShard) -> Sent {
    let AttentionShard { tokens, kv_heads, head_dim, bytes, .. } = *shard;
    let block = (tokens * 2 * kv_heads * head_dim) as u64;
    let steps = ring as u64 - 1;
    Sent { forward: steps * block * bytes as u64, backward: steps * block * (bytes as u64 + 4) }
}

/// (u-1)/u of the rank's data: forward q, k, v and the output, backward their gradients and one f32 per head. If there
/// are fewer KV heads than ranks, each is sent to every rank that needs it.
pub fn ulysses_sent(ulysses: usize, shard: &AttentionShard) -> Sent {
    let AttentionShard { heads, kv_heads, head_dim, .. } = after_ulysses(ulysses, shard);
    let to_each = (shard.tokens * (2 * heads + 2 * kv_heads) * head_dim * shard.bytes) as u64;
    let deltas = (shard.tokens * heads * 4) as u64;
    let others = ulysses as u64 - 1;
    Sent { forward: others * to_each, backward: others * (to_each + deltas) }
}
