//! Cost of a collective in the last timeline: seconds that every call takes, however small, and seconds per byte. The first
//! includes the waiting that repeats in every call, such as waking up a peer. Does not look at calls that are overlapped.

use lockstep_events::trace::{FileSpan, RankTrace, Timeline};
use lockstep_types::trace::SpanKind;
use serde::Serialize;

/// Exposed collectives of a rank.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct CallCost {
    /// Collectives per step.
    pub calls: f64,
    /// Seconds of each, whatever its size.
    pub latency: f64,
    /// Fraction of the time of all collectives that is latency, 0 to 1.
    pub latency_share: f64,
}

/// The cost on the rank that spends least in collectives: it waits least for ranks that are slower.
pub(super) fn call_cost(timeline: &Timeline) -> Option<CallCost> {
    let exposed = |rank: &RankTrace| -> f64 { calls(rank).iter().map(|call| call.1).sum() };
    let rank = timeline.ranks.iter().min_by(|a, b| exposed(a).total_cmp(&exposed(b)))?;
    let steps = rank.spans.iter().filter(|span| span.kind == SpanKind::Step).count();
    let calls = calls(rank);
    let [latency, per_byte] = line(&calls)?;
    let [fixed, moving] =
        [latency * calls.len() as f64, per_byte * calls.iter().map(|call| call.0).sum::<f64>()];
    Some(CallCost {
        calls: calls.len() as f64 / steps.max(1) as f64,
        latency,
        latency_share: fixed / (fixed + moving),
    })
}

/// Bytes and seconds of the collectives inside the steps, on the thread that computes.
fn calls(rank: &RankTrace) -> Vec<(f64, f64)> {
    let Some(main) = rank.main_thread() else { return Vec::new() };
    let steps: Vec<&FileSpan> =
        rank.spans.iter().filter(|span| span.kind == SpanKind::Step).collect();
    let inside =
        |span: &FileSpan| steps.iter().any(|s| s.start <= span.start && span.end() <= s.end());
    let is_collective = |span: &&FileSpan| {
        let call = span.call.as_ref();
        call.is_some_and(|call| call.members > 1 && call.message.is_none())
            && span.thread == main
            && inside(span)
    };
    let cost = |span: &FileSpan| (span.bytes.unwrap_or(0) as f64, span.duration as f64 / 1e9);
    rank.spans.iter().filter(is_collective).map(cost).collect()
}

/// Least squares of seconds = latency + bytes · slope, neither negative. None if all calls have the same size or take no
/// time: then nothing tells the two apart.
fn line(calls: &[(f64, f64)]) -> Option<[f64; 2]> {
    let count = calls.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| calls.iter().map(of).sum::<f64>() / count;
    let (bytes, seconds) = (mean(|call| call.0), mean(|call| call.1));
    let spread: f64 = calls.iter().map(|call| (call.0 - bytes).powi(2)).sum();
    let both: f64 = calls.iter().map(|call| (call.0 - bytes) * (call.1 - seconds)).sum();
    if calls.len() < 2 || spread <= 0.0 || seconds <= 0.0 {
        return None;
    }
    // The line goes through the means, so the total is that of the timeline.
    let slope = (both / spread).clamp(0.0, seconds / bytes);
    Some([seconds - slope * bytes, slope])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_and_bandwidth_are_found_and_never_negative() {
        let exact: Vec<(f64, f64)> =
            [0.0, 512.0, 1e6].map(|bytes| (bytes, 2e-4 + bytes * 1e-9)).to_vec();
        let [latency, slope] = line(&exact).unwrap();
        assert!((latency - 2e-4).abs() < 1e-12 && (slope - 1e-9).abs() < 1e-18);
        // Larger calls that are faster, and calls that cost nothing but their bytes.
        assert_eq!(line(&[(10.0, 3.0), (20.0, 1.0)]), Some([2.0, 0.0]));
        assert_eq!(line(&[(10.0, 1.0), (20.0, 5.0)]), Some([0.0, 0.2]));
        assert_eq!(line(&[(10.0, 3.0), (10.0, 1.0)]), None);
        assert_eq!(line(&[]), None);
    }
}
