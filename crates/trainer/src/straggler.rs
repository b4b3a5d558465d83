//! Finds the rank that the others wait for. All ranks end a step together, so the straggler is the rank that waits
//! least; compute times are compared. A pure function of the reported times.
//!
//! A single slow step is not a straggler: each rank's median over the last [`REPORTS`] reports counts. Ranks with the
//! same work are compared with each other. A rank that is alone on its pipeline stage is compared with the others by
//! its FLOPs, with a higher threshold.

use std::collections::VecDeque;
use std::fmt;

use lockstep_plan::Plan;
use lockstep_plan::model::flops_per_token;

/// Number of reports in the window.
pub const REPORTS: usize = 5;
/// Minimum number of reports before a straggler is named.
const MIN_REPORTS: usize = 3;

/// Minimum slowdown compared with ranks that have the same work.
const MIN_SLOWDOWN: f64 = 1.25;
/// Minimum slowdown compared with an estimate from the FLOPs of the plan.
const MIN_SLOWDOWN_BY_FLOPS: f64 = 2.0;
/// Minimum fraction of the step that is lost.
const MIN_LOST_FRACTION: f64 = 0.1;
/// Minimum time that is lost per step.
const MIN_LOST_SECONDS: f64 = 1e-3;

/// Times of one rank in seconds per step, averaged over the steps of one report.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Times {
    /// Everything except `waiting`.
    pub computing: f64,
    /// Exposed communication.
    pub waiting: f64,
    /// Reading samples; included in `computing`.
    pub reading: f64,
    /// Waiting for messages of other pipeline stages; included in `waiting`.
    pub pipe: f64,
    /// Time in which the rank could have run but the host had no free core.
    pub queued: f64,
}

/// A rank that the others wait for. Times are medians over the last reports, in seconds per step.
#[derive(Clone, PartialEq, Debug)]
pub struct Straggler {
    pub rank: usize,
    /// Number of ranks of the run.
    pub ranks: usize,
    pub computing: f64,
    /// Compute time of other ranks for the same work.
    pub others: f64,
    /// Time spent reading samples beyond that of the other ranks.
    pub reading: f64,
    /// Fraction of each step that the other ranks wait.
    pub waited: f64,
}

/// Work of a rank according to the plan.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpectedWork {
    /// Pipeline stage. Ranks of the same stage have the same work.
    pub stage: usize,
    /// FLOPs per token.
    pub flops: f64,
}

/// Work of each rank of a plan.
pub fn expected_work(plan: &Plan) -> Vec<ExpectedWork> {
    let (mesh, shape) = (plan.mesh(), &plan.model);
    let head = 6.0 * (shape.vocab * shape.dim) as f64;
    let layer = (flops_per_token(shape, plan.data.seq).total() - head) / shape.layers as f64;
    let of = |rank: usize| {
        let part = plan.part(rank);
        let layers = part.blocks.iter().filter(|block| block.name.starts_with("layers.")).count();
        let head = if part.has_head() { head } else { 0.0 };
        ExpectedWork { stage: mesh.coord(rank).pipe, flops: layers as f64 * layer + head }
    };
    (0..plan.ranks).map(of).collect()
}

/// Slowest rank, if it is a straggler. Each report has the times of every rank.
pub fn straggler(reports: &VecDeque<Vec<Times>>, work: &[ExpectedWork]) -> Option<Straggler> {
    if reports.len() < MIN_REPORTS || work.len() < 2 {
        return None;
    }
    let ranks = work.len();
    let typical = |of: fn(&Times) -> f64| -> Vec<f64> {
        (0..ranks).map(|rank| median(reports.iter().map(|times| of(&times[rank])))).collect()
    };
    let computing = typical(|times| times.computing);
    let waiting = typical(|times| times.waiting);
    let reading = typical(|times| times.reading);
    let step = median((0..ranks).map(|rank| computing[rank] + waiting[rank]));

    let slow = |rank: usize| {
        let others = || (0..ranks).filter(move |other| *other != rank);
        let same: Vec<usize> = others().filter(|o| work[*o].stage == work[rank].stage).collect();
        let (expected, min_slowdown) = match same.is_empty() {
            false => (median(same.iter().map(|other| computing[*other])), MIN_SLOWDOWN),
            // Alone on its stage: compare by FLOPs.
            true => {
                let per_flop = median(others().map(|other| computing[other] / work[other].flops));
                (per_flop * work[rank].flops, MIN_SLOWDOWN_BY_FLOPS)
            }
        };
        let excess = computing[rank] - expected;
        let waited = median(others().map(|other| waiting[other])) / step;
        let slow = computing[rank] >= min_slowdown * expected
            && excess >= MIN_LOST_SECONDS.max(MIN_LOST_FRACTION * step)
            && waited >= MIN_LOST_FRACTION;
        let excess_reading = reading[rank] - median(others().map(|other| reading[other]));
        slow.then(|| Straggler {
            rank,
            ranks,
            computing: computing[rank],
            others: expected,
            reading: excess_reading.max(0.0),
            waited,
        })
    };
    (0..ranks).filter_map(slow).max_by(|a, b| a.excess().total_cmp(&b.excess()))
}

impl Straggler {
    fn excess(&self) -> f64 {
        self.computing - self.others
    }
}

/// Predicate of a sentence; the caller prints the rank and its host.
impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Straggler { ranks, computing, others, reading, waited, .. } = *self;
        let others_name = if ranks == 2 { "the other" } else { "the others" };
        let wait = if ranks == 2 { "the other waits" } else { "the others wait" };
        write!(
            f,
            "computes {:.1}× as long as {others_name}: {} per step instead of {}; {wait} for it {:.0}% of each step",
            computing / others,
            milliseconds(computing),
            milliseconds(others),
            100.0 * waited
        )?;
        if reading > 0.5 * self.excess() {
            write!(f, "; reading samples takes {} of it", milliseconds(reading))?;
        }
        Ok(())
    }
}

fn milliseconds(seconds: f64) -> String {
    let digits = if seconds < 0.01 { 1 } else { 0 };
    format!("{:.digits$} ms", 1e3 * seconds)
}

/// Median, or 0 if there are no values.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Straggler in reports of compute times in milliseconds. A step ends when the slowest rank is done.
    fn find(stages: &[usize], flops: &[f64], reports: &[&[f64]]) -> Option<Straggler> {
        let work: Vec<ExpectedWork> = stages
            .iter()
            .zip(flops)
            .map(|(stage, flops)| ExpectedWork { stage: *stage, flops: *flops })
            .collect();
        let report = |row: &&[f64]| {
            let step = row.iter().copied().fold(0.0, f64::max) + 5.0;
            let times = |ms: &f64| Times {
                computing: ms / 1e3,
                waiting: (step - ms) / 1e3,
                ..Times::default()
            };
            row.iter().map(times).collect()
        };
        straggler(&reports.iter().map(report).collect(), &work)
    }

    #[test]
    fn straggler_is_found() {
        let equal: &[f64] = &[200.0, 204.0, 199.0, 201.0];
        let third: &[f64] = &[229.0, 231.0, 228.0, 412.0];
        let second: &[f64] = &[229.0, 500.0, 228.0, 230.0];
        let (slightly, tiny): (&[f64], &[f64]) =
            (&[200.0, 200.0, 200.0, 230.0], &[0.1, 0.1, 0.1, 0.4]);
        let (slow_last, slow_first): (&[f64], &[f64]) = (&[100.0, 210.0], &[250.0, 120.0]);
        let equal_work: (&[usize], &[f64]) = (&[0; 4], &[1.0; 4]);
        type Ranks<'a> = (&'a [usize], &'a [f64]);
        type Case<'a> = (&'a str, Ranks<'a>, &'a [&'a [f64]], Option<usize>);
        let cases: [Case<'_>; 11] = [
            ("equal ranks", equal_work, &[equal; 5], None),
            ("one slow rank", equal_work, &[third; 5], Some(3)),
            ("too few reports", equal_work, &[third; 2], None),
            ("one bad report", equal_work, &[equal, equal, third, equal, equal], None),
            (
                "two bad reports of different ranks",
                equal_work,
                &[equal, second, third, equal, equal],
                None,
            ),
            ("three of five", equal_work, &[third, equal, third, equal, third], Some(3)),
            ("another takes over", equal_work, &[third, second, second, second, third], Some(1)),
            ("slightly slower", equal_work, &[slightly; 5], None),
            ("steps of less than a millisecond", equal_work, &[tiny; 5], None),
            // The last stage has the head: twice the work takes twice the time.
            ("stage with more work", (&[0, 1], &[1.0, 2.0]), &[slow_last; 5], None),
            ("stage slow for its work", (&[0, 1], &[1.0, 2.0]), &[slow_first; 5], Some(0)),
        ];
        for (case, (stages, flops), reports, expected) in cases {
            let found = find(stages, flops, reports);
            let rank = found.as_ref().map(|straggler| straggler.rank);
            assert_eq!(rank, expected, "{case}: {found:?}");
        }
        // Stages of two ranks each: ranks are compared within their stage.
        let row: &[f64] = &[100.0, 100.0, 200.0, 320.0];
        let found = find(&[0, 0, 1, 1], &[1.0; 4], &[row; 5]).unwrap();
        assert_eq!((found.rank, found.others), (3, 0.2));
    }

    #[test]
    fn messages() {
        let mut straggler = Straggler {
            rank: 3,
            ranks: 4,
            computing: 0.412,
            others: 0.229,
            reading: 0.0,
            waited: 0.44,
        };
        assert_eq!(
            straggler.to_string(),
            "computes 1.8× as long as the others: 412 ms per step instead of 229 ms; the others wait for it 44% of each step"
        );
        straggler.reading = 0.15;
        straggler.ranks = 2;
        let message = straggler.to_string();
        assert!(message.contains("as long as the other:"), "{message}");
        assert!(message.ends_with("of each step; reading samples takes 150 ms of it"), "{message}");
    }

    #[test]
    fn median_and_milliseconds() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0].into_iter()), 2.5);
        assert_eq!(milliseconds(0.00412), "4.1 ms");
    }
}
