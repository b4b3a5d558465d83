//! Positions of context ranks, and valid context degrees.

use lockstep_plan::context::{
    AttentionShard, ContextKind, Run, Sent, check, degrees, multiple, ring_sent, ring_shard, runs,
    sent, ulysses_sent,
};

const KINDS: [ContextKind; 3] = [ContextKind::Ring, ContextKind::Ulysses, ContextKind::Both];

/// Number of (query, key) pairs under the causal mask.
fn work(held: &[Run]) -> usize {
    held.iter().flat_map(|run| run.start..run.end()).map(|position| position + 1).sum()
}

#[test]
fn positions_are_partitioned_evenly() {
    for (ulysses, ring) in (1..=6).flat_map(|u| (1..=6).map(move |r| (u, r))) {
        for times in [1, 3] {
            let (ranks, seq) = (ulysses * ring, times * multiple((ulysses, ring)));
            let held: Vec<Vec<Run>> =
                (0..ranks).map(|i| runs(ContextKind::Both, seq, (ulysses, ring), i)).collect();
            let mut positions: Vec<usize> =
                held.iter().flatten().flat_map(|run| run.start..run.end()).collect();
            positions.sort_unstable();
            assert_eq!(positions, (0..seq).collect::<Vec<_>>(), "{ulysses} {ring}");
            for (index, held) in held.iter().enumerate() {
                let len: usize = held.iter().map(|run| run.len).sum();
                assert_eq!(len, seq / ranks, "rank {index} of {ulysses} · {ring}");
                assert!(held.is_sorted_by_key(|run| run.start) && held.iter().all(|r| r.len > 0));
            }
        }
    }
}

#[test]
fn ring_ranks_have_equal_work() {
    for ring in 2..=8 {
        let seq = 2 * ring * 5;
        let shares: Vec<usize> = (0..ring).map(|rank| work(&ring_shard(seq, ring, rank))).collect();
        assert_eq!(shares, vec![seq * (seq + 1) / 2 / ring; ring]);
    }
}

#[test]
fn ulysses_ranks_split_the_positions_of_their_ring_rank() {
    let held = |index| runs(ContextKind::Both, 24, (3, 2), index);
    let run = |start, len| Run { start, len };
    // The ring's rank 0 holds 0..6 and 18..24, its rank 1 holds 6..18.
    let expected = [
        vec![run(0, 4)],
        vec![run(4, 2), run(18, 2)],
        vec![run(20, 4)],
        vec![run(6, 4)],
        vec![run(10, 4)],
        vec![run(14, 4)],
    ];
    assert_eq!((0..6).map(held).collect::<Vec<_>>(), expected);
}

#[test]
fn one_rank_holds_whole_sequences() {
    for kind in KINDS {
        assert_eq!(degrees(kind, 1, 12, 4), (1, 1));
        assert_eq!(runs(kind, 7, (1, 1), 0), [Run { start: 0, len: 7 }]);
        assert_eq!(check(kind, 1, 7, 12, 4), Ok(()));
    }
}

#[test]
fn both_leaves_two_ranks_to_the_ring_if_possible() {
    #[rustfmt::skip]
    let cases = [
        // context, heads, kv_heads, (ulysses, ring)
        (2, 8, 8, (1, 2)),
        (4, 8, 8, (2, 2)),
        (8, 8, 2, (4, 2)),
        (16, 8, 8, (8, 2)),
        (6, 12, 4, (2, 3)),
        (6, 12, 3, (3, 2)),
        (6, 12, 1, (3, 2)),
        (8, 3, 3, (1, 8)),
        (7, 7, 7, (1, 7)),
    ];
    for (context, heads, kv_heads, expected) in cases {
        let chosen = degrees(ContextKind::Both, context, heads, kv_heads);
        assert_eq!(chosen, expected, "context={context} heads={heads} kv_heads={kv_heads}");
    }
}

#[test]
fn errors_suggest_a_fix() {
    use ContextKind::*;
    #[rustfmt::skip]
    let cases = [
        // kind, context, seq, heads, kv_heads
        (Ring, 0, 64, 4, 4, "context must be at least 1 (got 0); use 1"),
        (Ring, 4, 100, 4, 4, "seq=100 is not a multiple of 8: a ring of 4 splits it into 8; use 96 or 104"),
        (Ulysses, 4, 6, 4, 4, "seq=6 is not a multiple of 4: ulysses splits it into 4; use 4 or 8"),
        (Both, 8, 60, 4, 4, "seq=60 is not a multiple of 8: ulysses=4 in a ring of 2 splits it into 8; use 56 or 64"),
        (Ulysses, 3, 96, 4, 4, "context=3 does not divide heads=4, as ulysses requires; use 2 or 4, or context_kind = \"ring\""),
        (Ulysses, 8, 96, 4, 4, "context=8 does not divide heads=4, as ulysses requires; use 4, or context_kind = \"ring\""),
        (Ulysses, 4, 96, 12, 6, "context=4 and kv_heads=6: neither divides the other, as ulysses requires; use 3 or 6, or context_kind = \"ring\""),
    ];
    for (kind, context, seq, heads, kv_heads, text) in cases {
        assert_eq!(check(kind, context, seq, heads, kv_heads), Err(text.into()));
    }
    for (kind, context, seq, heads, kv_heads) in
        [(Ring, 3, 96, 5, 1), (Ulysses, 4, 96, 12, 2), (Ulysses, 4, 8, 8, 4), (Both, 6, 12, 6, 3)]
    {
        assert_eq!(check(kind, context, seq, heads, kv_heads), Ok(()), "{kind:?} {context}");
    }
}

#[test]
fn kinds_are_serialized_as_in_run_files() {
    let written: Vec<String> =
        KINDS.iter().map(|kind| serde_json::to_string(kind).unwrap()).collect();
    assert_eq!(written, ["\"ring\"", "\"ulysses\"", "\"both\""]);
}

#[test]
fn bytes_sent_match_the_formulas() {
    let shard = AttentionShard { tokens: 32, heads: 8, kv_heads: 2, head_dim: 16, bytes: 2 };
    assert_eq!(sent((1, 1), &shard), Sent::default());
    assert_eq!(sent((1, 4), &shard), ring_sent(4, &shard));
    assert_eq!(sent((4, 1), &shard), ulysses_sent(4, &shard));
    // 3 × 32 tokens × 2 × 2 heads × 16 × 2 bytes; plus f32 gradients.
    assert_eq!(ring_sent(4, &shard), Sent { forward: 12_288, backward: 36_864 });
    // 3 × 32 tokens × (2 + 2 × 1 + 2) heads × 16 × 2 bytes; plus 2 f32 numbers.
    assert_eq!(ulysses_sent(4, &shard), Sent { forward: 18_432, backward: 19_200 });
}
