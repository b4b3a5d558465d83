//! Interleaved 1F1B: every rank holds several smaller stages (chunks), P apart. The bubble shrinks by the number of
//! chunks, and the number of messages grows by it.

use super::action::{Act, Action};
use super::clock::Times;

/// 1F1B over the rank's passes with the warm-up of Megatron-LM: P passes for each chunk but the last, and two for each
/// later rank. Rank r of P with C chunks holds min(2(P-r-1) + (C-1)P + 1, C·micro-batches) activations of a chunk.
///
/// One chunk is 1F1B with a longer warm-up: more memory, but more time for messages to arrive.
pub(super) fn actions(rank: usize, ranks: usize, chunks: usize, micros: usize) -> Vec<Action> {
    let turns = chunks * micros;
    let warmup = (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1).min(turns);
    let forward = |turn| {
        let (chunk, micro) = place(turn, ranks, chunks);
        Action::new(chunk * ranks + rank, Act::Forward, micro)
    };
    let backward = |turn| {
        let (chunk, micro) = place(turn, ranks, chunks);
        Action::new((chunks - 1 - chunk) * ranks + rank, Act::Backward, micro)
    };
    let mut list: Vec<Action> = (0..warmup).map(forward).collect();
    for turn in 0..turns {
        list.push(backward(turn));
        list.extend((warmup + turn < turns).then(|| forward(warmup + turn)));
    }
    list
}

/// Chunk and micro-batch of a pass: P micro-batches through the first chunk, the same through the second, and so on.
fn place(turn: usize, ranks: usize, chunks: usize) -> (usize, usize) {
    let (round, turn) = (turn / (ranks * chunks), turn % (ranks * chunks));
    (turn / ranks, round * ranks + turn % ranks)
}

/// (P-1)(F+B+W) of a chunk, which is (P-1)(F+B+W) / chunks of the rank's stages together.
pub(super) fn bubble(ranks: usize, times: &Times) -> f64 {
    (ranks - 1) as f64 * (times.forward + times.input + times.weights)
}
