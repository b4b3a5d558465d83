//! Order of tokens: rows by run, and how the rows of several ranks form those of their combined runs. Moves no data.

use std::ops::Range;

use lockstep_plan::context::Run;

/// Each run and its rows, in run-major order.
pub(super) fn rows(
    runs: &[Run],
    batch: usize,
) -> impl Iterator<Item = (Run, Range<usize>)> + use<'_> {
    runs.iter().scan(0, move |start, run| {
        let first = *start;
        *start += batch * run.len;
        Some((*run, first..*start))
    })
}

/// Rows that are contiguous both in the concatenation of the ranks' rows and in the rows of their combined runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub by_rank: Range<usize>,
    pub combined: Range<usize>,
}

/// The spans from the rows of ranks that hold `parts` to the rows of `whole`.
pub(super) fn spans(parts: &[Vec<Run>], whole: &[Run], batch: usize) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut by_rank = 0;
    for run in parts.iter().flatten() {
        let contains =
            |(whole, _): &(Run, Range<usize>)| whole.start <= run.start && run.end() <= whole.end();
        let (outer, rows) = rows(whole, batch).find(contains).expect("the parts form the whole");
        for sequence in 0..batch {
            let combined = rows.start + sequence * outer.len + run.start - outer.start;
            let span = Span {
                by_rank: by_rank..by_rank + run.len,
                combined: combined..combined + run.len,
            };
            by_rank += run.len;
            match spans.last_mut().filter(|last| last.combined.end == combined) {
                Some(last) => {
                    (last.by_rank.end, last.combined.end) = (span.by_rank.end, span.combined.end)
                }
                None => spans.push(span),
            }
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_plan::context::{ContextKind, ring_shard, runs};

    #[test]
    fn spans_map_every_row_to_its_position() {
        for (ulysses, ring) in [(2, 1), (3, 1), (2, 2), (3, 2), (4, 3)] {
            let seq = 24 * ring;
            for (rank, batch) in (0..ring).flat_map(|rank| [1, 2].map(|batch| (rank, batch))) {
                let of =
                    |p: usize| runs(ContextKind::Both, seq, (ulysses, ring), rank * ulysses + p);
                let (parts, whole) =
                    ((0..ulysses).map(of).collect::<Vec<_>>(), ring_shard(seq, ring, rank));
                // (sequence, position) of every row, in run-major order.
                let tokens = |runs: &[Run]| -> Vec<(usize, usize)> {
                    let of = |run: &Run| {
                        let run = *run;
                        (0..batch).flat_map(move |b| (run.start..run.end()).map(move |at| (b, at)))
                    };
                    runs.iter().flat_map(of).collect()
                };
                let by_rank: Vec<_> = parts.iter().flat_map(|part| tokens(part)).collect();
                let combined = tokens(&whole);
                let spans = spans(&parts, &whole, batch);
                assert_eq!(spans.iter().map(|s| s.by_rank.len()).sum::<usize>(), combined.len());
                for Span { by_rank: from, combined: to } in spans {
                    assert_eq!(by_rank[from], combined[to], "{ulysses} {ring} {rank} {batch}");
                }
            }
        }
    }

    #[test]
    fn one_sequence_is_one_span() {
        let of = |p| runs(ContextKind::Ulysses, 12, (3, 1), p);
        let spans = spans(&[of(0), of(1), of(2)], &ring_shard(12, 1, 0), 1);
        assert_eq!(spans, [Span { by_rank: 0..12, combined: 0..12 }]);
    }
}
