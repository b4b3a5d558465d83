//! Who keeps the others waiting. In a step that all ranks end together, the slow one is the one that waits least:
//! what is compared is how long each computes. Pure: it is given times, and says a name.
//!
//! One slow step is nobody's fault, so the last [`REPORTS`] reports are looked at together, and of each rank's
//! times the median counts. Ranks that do the same work are compared with each other; a rank whose stage of the
//! pipeline is like no other's is held to the others by the work that the plan gives it, with more patience.

use std::collections::VecDeque;
use std::fmt;

use lockstep_plan::Plan;
use lockstep_plan::model::flops_per_token;

/// Reports that are looked at together, and how many there must be.
pub const REPORTS: usize = 5;
const LEAST: usize = 3;

/// A straggler computes this many times as long as ranks with the same work, or as the plan lets expect.
const LIKE: f64 = 1.25;
const UNLIKE: f64 = 2.0;
/// And costs at least this share of each step, and this many seconds.
const SHARE: f64 = 0.1;
const SECONDS: f64 = 1e-3;

/// What a rank did with its time, in seconds per step, over the steps of one report.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Times {
    /// Everything but waiting.
    pub computing: f64,
    /// Exchanges that nothing hid.
    pub waiting: f64,
    /// Reading samples: a part of `computing`.
    pub reading: f64,
}

/// A rank that the others wait for, with the medians of the last reports.
#[derive(Clone, PartialEq, Debug)]
pub struct Straggler {
    pub rank: usize,
    /// Of all ranks that there are.
    pub ranks: usize,
    /// Seconds per step.
    pub computing: f64,
    /// What others with its work take.
    pub others: f64,
    /// Of `computing`, more than others spend, on reading samples.
    pub reading: f64,
    /// The share of each step that the others wait.
    pub waited: f64,
}

/// How much work each rank has, in units of its own.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpectedWork {
    /// Ranks of equal kind do the same.
    pub kind: usize,
    /// Operations per token of its samples.
    pub flops: f64,
}

/// The work of each rank of a plan: that of its stages.
pub fn expected_work(plan: &Plan) -> Vec<ExpectedWork> {
    let (mesh, shape) = (plan.mesh(), &plan.model);
    let head = 6.0 * (shape.vocab * shape.dim) as f64;
    let layer = (flops_per_token(shape, plan.data.seq).total() - head) / shape.layers as f64;
    let of = |rank: usize| {
        let part = plan.part(rank);
        let layers = part.blocks.iter().filter(|block| block.name.starts_with("layers.")).count();
        let head = if part.has_head() { head } else { 0.0 };
        ExpectedWork { kind: mesh.coord(rank).pipe, flops: layers as f64 * layer + head }
    };
    (0..plan.ranks).map(of).collect()
}

/// Whom, if anybody, the ranks wait for, in these reports: each has the times of every rank.
pub fn straggler(reports: &VecDeque<Vec<Times>>, work: &[ExpectedWork]) -> Option<Straggler> {
    if reports.len() < LEAST || work.len() < 2 {
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

    let judged = |rank: usize| {
        let others = || (0..ranks).filter(move |other| *other != rank);
        let like: Vec<usize> = others().filter(|o| work[*o].kind == work[rank].kind).collect();
        let (expected, times) = match like.is_empty() {
            false => (median(like.iter().map(|other| computing[*other])), LIKE),
            // A stage of its own kind: by the work that the plan gives it.
            true => {
                let per_flop = median(others().map(|other| computing[other] / work[other].flops));
                (per_flop * work[rank].flops, UNLIKE)
            }
        };
        let excess = computing[rank] - expected;
        let waited = median(others().map(|other| waiting[other])) / step;
        let slow = computing[rank] >= times * expected
            && excess >= SECONDS.max(SHARE * step)
            && waited >= SHARE;
        let more = reading[rank] - median(others().map(|other| reading[other]));
        slow.then(|| Straggler {
            rank,
            ranks,
            computing: computing[rank],
            others: expected,
            reading: more.max(0.0),
            waited,
        })
    };
    (0..ranks).filter_map(judged).max_by(|a, b| a.excess().total_cmp(&b.excess()))
}

impl Straggler {
    fn excess(&self) -> f64 {
        self.computing - self.others
    }
}

/// Without the host, which whoever shows it may know.
impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Straggler { ranks, computing, others, reading, waited, .. } = *self;
        let others_are = if ranks == 2 { "the other" } else { "the others" };
        let wait = if ranks == 2 { "the other waits" } else { "the others wait" };
        write!(
            f,
            "computes {:.1}× as long as {others_are}: {} a step against {}; {wait} {:.0}% of each step for it",
            computing / others,
            milliseconds(computing),
            milliseconds(others),
            100.0 * waited
        )?;
        if reading > 0.5 * self.excess() {
            write!(f, "; {} of it go to reading samples", milliseconds(reading))?;
        }
        Ok(())
    }
}

fn milliseconds(seconds: f64) -> String {
    let digits = if seconds < 0.01 { 1 } else { 0 };
    format!("{:.digits$} ms", 1e3 * seconds)
}

/// The middle one, or the mean of the two in the middle; 0 of none.
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

    /// Reports in milliseconds of computing, a row each; all steps end when the slowest rank is ready.
    fn named(kinds: &[usize], flops: &[f64], reports: &[&[f64]]) -> Option<Straggler> {
        let work: Vec<ExpectedWork> = kinds
            .iter()
            .zip(flops)
            .map(|(kind, flops)| ExpectedWork { kind: *kind, flops: *flops })
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
    fn who_is_named() {
        let equal: &[f64] = &[200.0, 204.0, 199.0, 201.0];
        let third: &[f64] = &[229.0, 231.0, 228.0, 412.0];
        let second: &[f64] = &[229.0, 500.0, 228.0, 230.0];
        let (little, tiny): (&[f64], &[f64]) =
            (&[200.0, 200.0, 200.0, 230.0], &[0.1, 0.1, 0.1, 0.4]);
        let (head, front): (&[f64], &[f64]) = (&[100.0, 210.0], &[250.0, 120.0]);
        let alike: (&[usize], &[f64]) = (&[0; 4], &[1.0; 4]);
        type Ranks<'a> = (&'a [usize], &'a [f64]);
        type Case<'a> = (&'a str, Ranks<'a>, &'a [&'a [f64]], Option<usize>);
        let cases: [Case<'_>; 11] = [
            ("all alike", alike, &[equal; 5], None),
            ("one slow rank", alike, &[third; 5], Some(3)),
            ("too early to tell", alike, &[third; 2], None),
            ("one bad report", alike, &[equal, equal, third, equal, equal], None),
            (
                "two bad reports of different ranks",
                alike,
                &[equal, second, third, equal, equal],
                None,
            ),
            ("three of five", alike, &[third, equal, third, equal, third], Some(3)),
            ("another takes over", alike, &[third, second, second, second, third], Some(1)),
            ("slower, but not by much", alike, &[little; 5], None),
            ("nothing to lose", alike, &[tiny; 5], None),
            // The last stage has the head: twice the work takes twice the time.
            ("stages by their work", (&[0, 1], &[1.0, 2.0]), &[head; 5], None),
            ("a stage that is slow by its work", (&[0, 1], &[1.0, 2.0]), &[front; 5], Some(0)),
        ];
        for (what, (kinds, flops), reports, expected) in cases {
            let named = named(kinds, flops, reports);
            assert_eq!(
                named.as_ref().map(|straggler| straggler.rank),
                expected,
                "{what}: {named:?}"
            );
        }
        // Stages of two ranks each: each is compared with its like.
        let row: &[f64] = &[100.0, 100.0, 200.0, 320.0];
        let named = named(&[0, 0, 1, 1], &[1.0; 4], &[row; 5]).unwrap();
        assert_eq!((named.rank, named.others), (3, 0.2));
    }

    #[test]
    fn words() {
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
            "computes 1.8× as long as the others: 412 ms a step against 229 ms; the others wait 44% of each step for it"
        );
        straggler.reading = 0.15;
        straggler.ranks = 2;
        let told = straggler.to_string();
        assert!(told.contains("as long as the other:"), "{told}");
        assert!(told.ends_with("for it; 150 ms of it go to reading samples"), "{told}");
    }

    #[test]
    fn a_step_of_microseconds_is_no_matter() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert_eq!(median([4.0, 1.0].into_iter()), 2.5);
        assert_eq!(milliseconds(0.00412), "4.1 ms");
    }
}
