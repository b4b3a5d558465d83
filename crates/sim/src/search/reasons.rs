//! Explains the best layout: its bottlenecks, and for each knob the cost of the neighbouring values. All numbers come
//! from estimates.

use lockstep_plan::{GroupKind, Layout, Plan};

use super::candidate::{Candidate, Knob};
use super::{Limits, Objective, Proposal, Search, value};
use crate::cluster::GIB;
use crate::{Cluster, Estimate, Flow, estimate};

/// A knob and the alternatives to its value.
#[derive(Clone, PartialEq, Debug)]
pub struct Reason {
    pub knob: Knob,
    /// Current setting: `tensor=8`.
    pub setting: String,
    pub alternatives: Vec<Alternative>,
}

/// Another value of a knob.
#[derive(Clone, PartialEq, Debug)]
pub struct Alternative {
    /// `tensor=16`.
    pub setting: String,
    /// Objective of the best nearby layout with this setting, relative to the best layout: 1.38. None: none fits.
    pub ratio: Option<f64>,
    pub why: String,
}

/// When a degree changes, the other degrees may vary by this factor.
const NEAR: usize = 2;

/// The next smaller and larger value of every knob that has several.
pub fn reasons(search: &Search, best: &Proposal, by: Objective) -> Vec<Reason> {
    let knobs = Knob::REPORTED.into_iter().filter(|knob| search.values(*knob).len() > 1);
    let reason = |knob: Knob| {
        let setting = knob.setting(knob.of(&best.plan));
        let values = neighbours(search, knob, &best.plan);
        let alternatives =
            values.into_iter().map(|value| alternative(search, best, by, knob, value)).collect();
        Reason { knob, setting, alternatives }
    };
    knobs.map(reason).filter(|reason| !reason.alternatives.is_empty()).collect()
}

/// The next values below and above; all other values for schedules, which have no order.
fn neighbours(search: &Search, knob: Knob, plan: &Plan) -> Vec<usize> {
    let current = knob.of(plan);
    let values = search.values(knob);
    if knob == Knob::Schedule {
        let others = values.into_iter().filter(|value| *value != current && plan.layout.pipe > 1);
        return others.collect();
    }
    if (knob == Knob::Sequence && plan.layout.tensor == 1)
        || (knob == Knob::Zero && plan.layout.data * plan.layout.context == 1)
    {
        return Vec::new();
    }
    let below = values.iter().copied().filter(|value| *value < current).max();
    let above = values.iter().copied().filter(|value| *value > current).min();
    [below, above].into_iter().flatten().collect()
}

fn alternative(
    search: &Search,
    best: &Proposal,
    by: Objective,
    knob: Knob,
    value: usize,
) -> Alternative {
    let cluster = search.request.cluster;
    let setting = knob.setting(value);
    let limits = near(&best.plan, knob).with(knob, value..=value);
    let Some(other) = search.best(by, 1, &limits).pop() else {
        let why = match search.smallest(&limits) {
            Some(smallest) => {
                format!(
                    "no similar layout fits: the smallest exceeds the memory by {}",
                    gib(smallest.over())
                )
            }
            None => "not divisible: the model or the batch does not allow it".to_string(),
        };
        return Alternative { setting, ratio: None, why };
    };
    let ratio = other.value(by) / best.value(by);
    let mut why = match by {
        Objective::Memory => {
            format!("{} instead of {} on the fullest rank", gib(other.bytes()), gib(best.bytes()))
        }
        _ => difference(cluster, &best.estimate, &other.estimate),
    };
    // The current value may be needed for memory: say so if changing only this knob does not fit.
    if let Some(changed) = with_knob(search, best, knob, value).filter(|plan| plan.over() > 0.0) {
        why = format!(
            "alone it exceeds the memory by {}; with other changes {why}",
            gib(changed.over())
        );
    }
    Alternative { setting, ratio: Some(ratio), why }
}

/// Limits around a plan, with one knob free.
fn near(plan: &Plan, free: Knob) -> Limits {
    let knobs = [Knob::Tensor, Knob::Context, Knob::Pipe, Knob::MicroBatch];
    // Knobs that are not degrees are compared with fixed degrees.
    let degree =
        matches!(free, Knob::Tensor | Knob::Context | Knob::Pipe | Knob::Data | Knob::Expert);
    let nearby = |knob: Knob| {
        let current = knob.of(plan);
        let near = if degree || knob == Knob::MicroBatch { NEAR } else { 1 };
        (knob, current.div_ceil(near)..=current * near)
    };
    let ranks = (Knob::Ranks, plan.ranks..=plan.ranks);
    Limits(knobs.into_iter().filter(|knob| *knob != free).map(nearby).chain([ranks]).collect())
}

/// The same layout with one knob changed and the number of replicas adapted.
fn with_knob(search: &Search, best: &Proposal, knob: Knob, value: usize) -> Option<Proposal> {
    let cluster = search.request.cluster;
    let mut layout = best.plan.layout.clone();
    match knob {
        Knob::Tensor => layout.tensor = value,
        Knob::Pipe => layout.pipe = value,
        Knob::Context => layout.context = value,
        Knob::Expert => layout.expert = value,
        Knob::Zero => layout.zero = value as u8,
        Knob::Recompute => layout.recompute = super::candidate::RECOMPUTES[value],
        _ => return None,
    }
    let others = layout.tensor * layout.pipe * layout.context;
    let whole = best.plan.layout.shard == best.plan.layout.data * best.plan.layout.context;
    layout.data =
        best.plan.ranks.checked_div(others).filter(|data| data * others == best.plan.ranks)?;
    let replicas = layout.data * layout.context;
    layout.shard = match layout.zero {
        0 => 1,
        _ if whole || best.plan.layout.zero == 0 => replicas,
        _ => layout.shard,
    };
    let layout = Layout { keep_gathered: layout.keep_gathered && layout.zero == 3, ..layout };
    let candidate =
        Candidate { ranks: best.plan.ranks, micro_batch: best.plan.train.micro_batch, layout };
    let plan = search.resolved(&candidate)?;
    let estimate = estimate(&plan, cluster, &search.options);
    Some(Proposal { plan, estimate })
}

/// The largest contribution to the time difference between two estimates.
fn difference(cluster: &Cluster, best: &Estimate, other: &Estimate) -> String {
    let (ours, theirs) = (time_breakdown(best), time_breakdown(other));
    let grown = |index: &usize| theirs[*index].1 - ours[*index].1;
    let most = (0..ours.len()).max_by(|a, b| grown(a).total_cmp(&grown(b))).unwrap_or(0);
    let (name, seconds) = (theirs[most].0, grown(&most));
    if seconds < 0.002 * best.step_s {
        return "equally fast".into();
    }
    let over = link_of(cluster, other, name);
    let far = over.map_or(String::new(), |link| format!(" over {link}"));
    format!("{name}{far} {} more", time(seconds))
}

/// Time breakdown of a step, in seconds.
pub fn time_breakdown(estimate: &Estimate) -> [(&'static str, f64); 9] {
    let time = &estimate.time;
    [
        ("compute", time.compute),
        ("kernel overhead", time.host),
        ("tensor communication", time.tensor),
        ("context communication", time.context),
        ("expert communication", time.expert),
        ("data communication", time.data),
        ("pipeline bubble", time.bubble),
        ("optimizer", time.optimizer),
        ("waiting for slower ranks", time.straggling),
    ]
}

/// The link on which communication of that name takes the most time.
fn link_of<'a>(cluster: &'a Cluster, estimate: &Estimate, name: &str) -> Option<&'a str> {
    let own = |flow: &&Flow| axis_of(flow.kind) == name;
    let most = estimate.flows.iter().filter(own).max_by(|a, b| a.total().total_cmp(&b.total()));
    most.map(|flow| cluster.links[flow.link].name.as_str())
}

fn axis_of(kind: Option<GroupKind>) -> &'static str {
    match kind {
        Some(GroupKind::Tensor | GroupKind::Keys) => "tensor communication",
        Some(GroupKind::Context) => "context communication",
        Some(GroupKind::Expert) => "expert communication",
        Some(GroupKind::Pipe) => "pipeline bubble",
        _ => "data communication",
    }
}

/// Bottlenecks of a layout: the parts of the step besides compute, the largest first, and the free memory.
pub fn bottlenecks(proposal: &Proposal, cluster: &Cluster) -> Vec<String> {
    let estimate = &proposal.estimate;
    let share = |seconds: f64| 100.0 * seconds / estimate.step_s;
    let mut lines = vec![format!(
        "compute takes {:.0}% of the step, at {:.0}% of the peak FLOP/s",
        share(estimate.time.compute),
        100.0 * estimate.compute_rate
    )];
    let mut rest: Vec<(&str, f64)> = time_breakdown(estimate).into_iter().skip(1).collect();
    rest.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (name, seconds) in rest.into_iter().filter(|(_, seconds)| share(*seconds) >= 0.5) {
        let over =
            link_of(cluster, estimate, name).map_or(String::new(), |link| format!(" over {link}"));
        let exposed = if name.ends_with("communication") { "exposed " } else { "" };
        lines.push(format!("{exposed}{name}{over}: {} ({:.1}%)", time(seconds), share(seconds)));
    }
    let left = -proposal.over();
    lines.push(match left >= 0.0 {
        true => format!("the fullest rank has {} of memory left", gib(left)),
        false => format!("the fullest rank exceeds its memory by {}", gib(-left)),
    });
    lines
}

fn gib(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / GIB)
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", 1e3 * s),
    }
}

impl Reason {
    /// One line: `tensor=8: tensor=4 +12% (…); tensor=16 +38% (…)`.
    pub fn line(&self) -> String {
        let alternatives = self.alternatives.iter().map(|other| match other.ratio {
            None => format!("{}: {}", other.setting, other.why),
            Some(ratio) => {
                format!("{} {:+.1}% ({})", other.setting, 100.0 * (ratio - 1.0), other.why)
            }
        });
        format!("{}: {}", self.setting, alternatives.collect::<Vec<_>>().join("; "))
    }
}

impl Search<'_> {
    /// All values of a knob in the search space.
    pub fn values(&self, knob: Knob) -> Vec<usize> {
        let mut values: Vec<usize> = match knob {
            Knob::Zero => vec![0, 1, 2, 3],
            Knob::Schedule => (0..lockstep_plan::schedule::ScheduleKind::ALL.len()).collect(),
            Knob::Chunks => (1..=super::MOST_CHUNKS).collect(),
            Knob::Shard => {
                super::space::divisors(self.request.ranks.iter().copied().max().unwrap_or(1))
            }
            _ => self.groups.iter().map(|group| knob.value(&group.candidate)).collect(),
        };
        values.sort_unstable();
        values.dedup();
        values
    }
}

impl Proposal {
    /// The value of an objective.
    pub fn value(&self, by: Objective) -> f64 {
        value(by, self.plan.ranks, self.estimate.step_s, self.bytes())
    }
}
