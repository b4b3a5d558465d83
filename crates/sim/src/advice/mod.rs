//! Step-by-step advice: start with plain data parallelism and add one technique at a time, only if it gains something.
//! Every step is the best layout that the search finds with the techniques so far.

mod batch;
mod slow_link;

pub use batch::{BatchRemarks, batch_remarks};
pub use slow_link::{SlowTensor, slow_tensor};

use crate::search::{Knob, Limits, Objective, Proposal, Search, bottlenecks, time_breakdown};
use crate::{Cluster, Estimate};

/// A technique and its benefit.
#[derive(Clone, PartialEq, Debug)]
pub struct LadderStep {
    /// `recompute`, `ZeRO`, ….
    pub technique: &'static str,
    /// The best layout with this technique and all that were taken before. None: no layout fits.
    pub proposal: Option<Proposal>,
    pub taken: bool,
    pub why: String,
}

/// Minimum gain for a technique to be taken.
const MIN_GAIN: f64 = 0.03;

/// All techniques with their knobs, in the order in which they are tried.
const TECHNIQUES: [(&str, &[Knob]); 7] = [
    ("data parallel", &[Knob::Data, Knob::MicroBatch]),
    ("recompute", &[Knob::Recompute]),
    ("ZeRO", &[Knob::Zero, Knob::Shard]),
    ("tensor parallel", &[Knob::Tensor, Knob::Sequence]),
    ("pipeline", &[Knob::Pipe, Knob::Schedule, Knob::Chunks]),
    ("context parallel", &[Knob::Context, Knob::ContextKind]),
    ("expert parallel", &[Knob::Expert]),
];

/// The steps for all techniques that apply to the model.
pub fn ladder(search: &Search, cluster: &Cluster) -> Vec<LadderStep> {
    let mut allowed: Vec<Knob> = Vec::new();
    let mut steps: Vec<LadderStep> = Vec::new();
    let mut current: Option<Proposal> = None;
    for (technique, knobs) in TECHNIQUES {
        // Skip techniques without alternatives: a dense model has no expert axis.
        if steps.len() > 1 && knobs.iter().all(|knob| search.values(*knob).len() < 2) {
            continue;
        }
        let with: Vec<Knob> = allowed.iter().chain(knobs).copied().collect();
        let proposal = search.best(Objective::Time, 1, &without(&with)).pop();
        let (taken, why) = match &proposal {
            None => (false, why_none_fits(search, &with)),
            Some(now) => judge(cluster, current.as_ref(), now, steps.is_empty()),
        };
        // If nothing fits yet, the technique stays allowed, because later steps may need it.
        if taken || proposal.is_none() {
            allowed = with;
        }
        if taken {
            current = proposal.clone();
        }
        steps.push(LadderStep { technique, proposal, taken, why });
    }
    steps
}

/// Limits that keep every knob that is not named at its default.
fn without(named: &[Knob]) -> Limits {
    let usual = |knob: &Knob| match knob {
        Knob::Zero | Knob::Recompute | Knob::Sequence | Knob::ContextKind => 0..=0,
        _ => 1..=1,
    };
    let all = TECHNIQUES.iter().flat_map(|(_, knobs)| knobs.iter());
    // Without a pipeline, the schedule has no effect.
    let limited =
        all.filter(|knob| !named.contains(knob) && !matches!(knob, Knob::Schedule | Knob::Shard));
    Limits(limited.map(|knob| (*knob, usual(knob))).collect())
}

fn why_none_fits(search: &Search, with: &[Knob]) -> String {
    match search.smallest(&without(with)) {
        Some(smallest) => {
            let over = smallest.over() / (1u64 << 30) as f64;
            format!("does not fit: exceeds the memory by at least {over:.1} GiB")
        }
        None => "no valid layout: the ranks do not divide the batch or the model".into(),
    }
}

/// Whether to take a technique that gives the proposal `now`, and why.
fn judge(
    cluster: &Cluster,
    before: Option<&Proposal>,
    now: &Proposal,
    first: bool,
) -> (bool, String) {
    let bottleneck = || bottlenecks(now, cluster).get(1).cloned().unwrap_or_default();
    match before {
        None if first => (true, format!("fits; {}", bottleneck())),
        None => (true, format!("fits now; {}", bottleneck())),
        Some(before) => {
            let gain = 1.0 - now.estimate.step_s / before.estimate.step_s;
            match gain >= MIN_GAIN {
                true => (
                    true,
                    format!(
                        "{:.1}% faster: {}",
                        100.0 * gain,
                        shrunk(&before.estimate, &now.estimate)
                    ),
                ),
                false => {
                    (false, format!("not needed: would gain only {:.1}%", 100.0 * gain.max(0.0)))
                }
            }
        }
    }
}

/// The part of the step that shrank the most.
fn shrunk(before: &Estimate, now: &Estimate) -> String {
    let (old, new) = (time_breakdown(before), time_breakdown(now));
    let less = |index: &usize| old[*index].1 - new[*index].1;
    let most = (0..old.len()).max_by(|a, b| less(a).total_cmp(&less(b))).unwrap_or(0);
    format!("{} {:.3} s instead of {:.3} s", old[most].0, new[most].1, old[most].1)
}
