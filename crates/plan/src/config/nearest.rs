//! Spelling suggestions for mistyped words.

/// Names that other systems use for our keys.
const ELSEWHERE: [(&str, &str); 30] = [
    ("batch_size", "global_batch"),
    ("global_batch_size", "global_batch"),
    ("micro_batch_size", "micro_batch"),
    ("local_batch_size", "micro_batch"),
    ("block_size", "seq"),
    ("context_length", "seq"),
    ("seq_len", "seq"),
    ("seq_length", "seq"),
    ("d_model", "dim"),
    ("hidden_size", "dim"),
    ("n_embd", "dim"),
    ("n_layer", "layers"),
    ("n_layers", "layers"),
    ("num_layers", "layers"),
    ("n_head", "heads"),
    ("n_heads", "heads"),
    ("num_heads", "heads"),
    ("n_kv_heads", "kv_heads"),
    ("num_experts", "experts"),
    ("ffn_dim", "ffn"),
    ("intermediate_size", "ffn"),
    ("vocab_size", "vocab"),
    ("max_iters", "steps"),
    ("max_steps", "steps"),
    ("learning_rate", "lr"),
    ("warmup_steps", "warmup"),
    ("grad_clip", "clip"),
    ("max_grad_norm", "clip"),
    ("dtype", "compute"),
    ("activation_checkpoint", "recompute"),
];

/// The word that `typed` was probably meant to be.
pub fn nearest<'w>(typed: &str, words: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    let ours = ELSEWHERE.iter().find(|(theirs, _)| *theirs == typed).map(|(_, ours)| *ours);
    // At most a third of the letters may differ, and at least one.
    let most = (typed.chars().count() / 3).max(1);
    words
        .map(|word| (if ours == Some(word) { 0 } else { distance(typed, word) }, word))
        .filter(|(distance, word)| *distance <= most && *distance < word.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

/// Damerau-Levenshtein distance: insertions, deletions, substitutions and swaps of adjacent letters.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    // cost[i][j]: distance between the first i letters of `from` and the first j of `to`.
    let mut cost = vec![vec![0; to.len() + 1]; from.len() + 1];
    for i in 0..=from.len() {
        for j in 0..=to.len() {
            cost[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = cost[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
                let step = change.min(cost[i - 1][j] + 1).min(cost[i][j - 1] + 1);
                let swapped =
                    i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
                if swapped { step.min(cost[i - 2][j - 2] + 1) } else { step }
            };
        }
    }
    cost[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let cases = [
            ("", "", 0),
            ("", "ab", 2),
            ("lr", "lr", 0),
            ("stpes", "steps", 1),
            ("haeds", "head", 2),
        ];
        for (from, to, expected) in cases {
            assert_eq!(distance(from, to), expected, "{from} {to}");
            assert_eq!(distance(to, from), expected, "{to} {from}");
        }
    }

    #[test]
    fn suggestions() {
        let words = ["lr", "min_lr", "steps", "seq", "heads", "kv_heads", "warmup"];
        let cases = [
            ("lrr", Some("lr")),
            ("head", Some("heads")),
            ("stpes", Some("steps")),
            ("learning_rate", Some("lr")),
            ("warm_up", Some("warmup")),
            ("x", None),
            ("momentum", None),
        ];
        for (typed, expected) in cases {
            assert_eq!(nearest(typed, words.into_iter()), expected, "{typed}");
        }
    }
}
