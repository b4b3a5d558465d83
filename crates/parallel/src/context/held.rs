//! Where tokens lie: rows of runs, and how the rows of several ranks make up those of their runs together.
//! Moves nothing.

use std::ops::Range;

use lockstep_plan::context::Run;

/// Each run, and its rows in run-major order.
pub(super) fn rows(
    runs: &[Run],
    batch: usize,
) -> impl Iterator<Item = (Run, Range<usize>)> + use<'_> {
    runs.iter().scan(0, move |at, run| {
        let first = *at;
        *at += batch * run.len;
        Some((*run, first..*at))
    })
}

/// Rows that lie side by side both among the ranks' rows, rank after rank, and in what they hold together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub apart: Range<usize>,
    pub together: Range<usize>,
}

/// How the rows of ranks that hold `parts` make up the rows of `whole`.
pub(super) fn spans(parts: &[Vec<Run>], whole: &[Run], batch: usize) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut apart = 0;
    for run in parts.iter().flatten() {
        let around =
            |(whole, _): &(Run, Range<usize>)| whole.start <= run.start && run.end() <= whole.end();
        let (outer, rows) = rows(whole, batch).find(around).expect("parts make up the whole");
        for sequence in 0..batch {
            let together = rows.start + sequence * outer.len + run.start - outer.start;
            let span =
                Span { apart: apart..apart + run.len, together: together..together + run.len };
            apart += run.len;
            match spans.last_mut().filter(|last| last.together.end == together) {
                Some(last) => {
                    (last.apart.end, last.together.end) = (span.apart.end, span.together.end)
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
    fn rows_of_neighbours_find_their_places() {
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
                let apart: Vec<_> = parts.iter().flat_map(|part| tokens(part)).collect();
                let together = tokens(&whole);
                let spans = spans(&parts, &whole, batch);
                assert_eq!(spans.iter().map(|s| s.apart.len()).sum::<usize>(), together.len());
                for Span { apart: from, together: to } in spans {
                    assert_eq!(apart[from], together[to], "{ulysses} {ring} {rank} {batch}");
                }
            }
        }
    }

    #[test]
    fn one_sequence_needs_no_moving() {
        let of = |p| runs(ContextKind::Ulysses, 12, (3, 1), p);
        let spans = spans(&[of(0), of(1), of(2)], &ring_shard(12, 1, 0), 1);
        assert_eq!(spans, [Span { apart: 0..12, together: 0..12 }]);
    }
}
