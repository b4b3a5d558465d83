//! The ladder of a careful engineer: plain data parallel first, then one means after the other, each only where the
//! one before leaves something to gain. Every rung is the best layout that its means allow, as the search finds it.

mod batch;

pub use batch::{BatchRemarks, batch_remarks};

use crate::search::{Knob, Limits, Objective, Proposal, Search, limit, parts};
use crate::{Cluster, Estimate};

/// A means, and what it brings.
#[derive(Clone, PartialEq, Debug)]
pub struct LadderStep {
    /// `recompute`, `ZeRO`, ….
    pub means: &'static str,
    /// The best layout with all means that were taken before and this one, where one fits.
    pub proposal: Option<Proposal>,
    pub taken: bool,
    pub why: String,
}

/// What a means must gain to be worth its trouble.
const WORTH: f64 = 0.03;

/// All means, in the order in which they are tried.
const MEANS: [(&str, &[Knob]); 7] = [
    ("data parallel", &[Knob::Data, Knob::MicroBatch]),
    ("recompute", &[Knob::Recompute]),
    ("ZeRO", &[Knob::Zero, Knob::Shard]),
    ("tensor parallel", &[Knob::Tensor, Knob::Sequence]),
    ("pipeline", &[Knob::Pipe, Knob::Schedule, Knob::Chunks]),
    ("context parallel", &[Knob::Context, Knob::ContextKind]),
    ("expert parallel", &[Knob::Expert]),
];

/// The rungs from the first to the last that the model knows.
pub fn ladder(search: &Search, cluster: &Cluster) -> Vec<LadderStep> {
    let mut allowed: Vec<Knob> = Vec::new();
    let mut rungs: Vec<LadderStep> = Vec::new();
    let mut standing: Option<Proposal> = None;
    for (means, knobs) in MEANS {
        // A model without experts has no such axis.
        if rungs.len() > 1 && knobs.iter().all(|knob| search.answers(*knob).len() < 2) {
            continue;
        }
        let with: Vec<Knob> = allowed.iter().chain(knobs).copied().collect();
        let proposal = search.best(Objective::Time, 1, &without(&with)).pop();
        let (taken, why) =
            judge(search, cluster, standing.as_ref(), proposal.as_ref(), &with, rungs.is_empty());
        // What fits nothing may yet be needed by what comes after: it stays in hand.
        if taken || proposal.is_none() {
            allowed = with;
        }
        if taken {
            standing = proposal.clone();
        }
        rungs.push(LadderStep { means, proposal, taken, why });
    }
    rungs
}

/// Every knob that is not named stands as it does where nobody has touched it.
fn without(named: &[Knob]) -> Limits {
    let usual = |knob: &Knob| match knob {
        Knob::Zero | Knob::Recompute | Knob::Sequence | Knob::ContextKind => 0..=0,
        _ => 1..=1,
    };
    let all = MEANS.iter().flat_map(|(_, knobs)| knobs.iter());
    // Where there is no pipeline, schedules and chunks are as they are.
    let limited =
        all.filter(|knob| !named.contains(knob) && !matches!(knob, Knob::Schedule | Knob::Shard));
    Limits(limited.map(|knob| (*knob, usual(knob))).collect())
}

fn judge(
    search: &Search,
    cluster: &Cluster,
    before: Option<&Proposal>,
    now: Option<&Proposal>,
    with: &[Knob],
    first: bool,
) -> (bool, String) {
    let Some(now) = now else {
        return (false, match search.smallest(&without(with)) {
            Some(smallest) => {
                let over = smallest.over() / (1u64 << 30) as f64;
                format!("does not fit: at least {over:.1} GiB over")
            }
            None => "no such layout: the batch or the model cannot be cut into as many pieces as there are ranks".into(),
        });
    };
    let bottleneck = || limit(now, cluster).get(1).cloned().unwrap_or_default();
    match before {
        None if first => (true, format!("fits; {}", bottleneck())),
        None => (true, format!("now it fits; {}", bottleneck())),
        Some(before) => {
            let gain = 1.0 - now.estimate.step_s / before.estimate.step_s;
            match gain >= WORTH {
                true => (
                    true,
                    format!(
                        "{:.1}% faster: {}",
                        100.0 * gain,
                        shrunk(&before.estimate, &now.estimate)
                    ),
                ),
                false => {
                    (false, format!("not needed: it would gain {:.1}%", 100.0 * gain.max(0.0)))
                }
            }
        }
    }
}

/// What of a step became less.
fn shrunk(before: &Estimate, now: &Estimate) -> String {
    let (old, new) = (parts(before), parts(now));
    let less = |index: &usize| old[*index].1 - new[*index].1;
    let most = (0..old.len()).max_by(|a, b| less(a).total_cmp(&less(b))).unwrap_or(0);
    format!("{} {:.3} s instead of {:.3} s", old[most].0, new[most].1, old[most].1)
}
