//! Why the best layout is as it is: what limits it, and for each knob what one turn to either side would cost. Words with
//! numbers, from estimates; judges nothing that was not estimated.

use lockstep_plan::{GroupKind, Layout, Plan};

use super::candidate::{Candidate, Knob};
use super::{Limits, Objective, Proposal, Search, value};
use crate::cluster::GIB;
use crate::{Cluster, Estimate, Flow, estimate};

/// A knob, and what happens when it is turned.
#[derive(Clone, PartialEq, Debug)]
pub struct Reason {
    pub knob: Knob,
    /// As it stands: `tensor=8`.
    pub typed: String,
    pub turns: Vec<Alternative>,
}

/// One turn of a knob.
#[derive(Clone, PartialEq, Debug)]
pub struct Alternative {
    /// `tensor=16`.
    pub typed: String,
    /// The best layout near by with this answer, as a share of the best one's value: 1.38. None: none fits.
    pub times: Option<f64>,
    pub why: String,
}

/// How far from the best layout others are looked for when a degree is turned: each other half to twice its own.
const NEAR: usize = 2;

/// For every knob that could be turned, one turn down and one up.
pub fn reasons(search: &Search, best: &Proposal, by: Objective) -> Vec<Reason> {
    let told = Knob::TOLD.into_iter().filter(|knob| search.answers(*knob).len() > 1);
    let reason = |knob: Knob| {
        let here = knob.of(&best.plan);
        let turns = neighbours(search, knob, &best.plan);
        let turns = turns.into_iter().map(|answer| turned(search, best, by, knob, answer));
        Reason { knob, typed: knob.typed(here), turns: turns.collect() }
    };
    told.map(reason).filter(|reason| !reason.turns.is_empty()).collect()
}

/// The next answers below and above; of schedules, which have no order, all others.
fn neighbours(search: &Search, knob: Knob, plan: &Plan) -> Vec<usize> {
    let here = knob.of(plan);
    let answers = search.answers(knob);
    if knob == Knob::Schedule {
        let others = answers.into_iter().filter(|answer| *answer != here && plan.layout.pipe > 1);
        return others.collect();
    }
    if (knob == Knob::Sequence && plan.layout.tensor == 1)
        || (knob == Knob::Zero && plan.layout.data * plan.layout.context == 1)
    {
        return Vec::new();
    }
    let below = answers.iter().copied().filter(|answer| *answer < here).max();
    let above = answers.iter().copied().filter(|answer| *answer > here).min();
    [below, above].into_iter().flatten().collect()
}

fn turned(
    search: &Search,
    best: &Proposal,
    by: Objective,
    knob: Knob,
    answer: usize,
) -> Alternative {
    let cluster = search.wanted.cluster;
    let typed = knob.typed(answer);
    let limits = near(&best.plan, knob).with(knob, answer..=answer);
    let Some(other) = search.best(by, 1, &limits).pop() else {
        let why = match search.smallest(&limits) {
            Some(smallest) => {
                format!("nothing near fits: the smallest is {} over", gib(smallest.over()))
            }
            None => "the model or the batch does not allow it here".to_string(),
        };
        return Alternative { typed, times: None, why };
    };
    let times = other.value(by) / best.value(by);
    let mut why = match by {
        Objective::Memory => {
            format!("{} and not {} on the fullest rank", gib(other.bytes()), gib(best.bytes()))
        }
        _ => difference(cluster, &best.estimate, &other.estimate),
    };
    // What the knob as it stands is there for.
    if let Some(twin) = twin(search, best, knob, answer).filter(|twin| twin.over() > 0.0) {
        why = format!("by itself {} over; at best {why}", gib(twin.over()));
    }
    Alternative { typed, times: Some(times), why }
}

/// Around a plan, in all directions but one.
fn near(plan: &Plan, free: Knob) -> Limits {
    let knobs = [Knob::Tensor, Knob::Context, Knob::Pipe, Knob::MicroBatch];
    // A choice of other kinds is made for the degrees as they are.
    let degree =
        matches!(free, Knob::Tensor | Knob::Context | Knob::Pipe | Knob::Data | Knob::Expert);
    let around = |knob: Knob| {
        let here = knob.of(plan);
        let near = if degree || knob == Knob::MicroBatch { NEAR } else { 1 };
        (knob, here.div_ceil(near)..=here * near)
    };
    let ranks = (Knob::Ranks, plan.ranks..=plan.ranks);
    Limits(knobs.into_iter().filter(|knob| *knob != free).map(around).chain([ranks]).collect())
}

/// The same layout with one knob turned, and as many replicas as that leaves room for.
fn twin(search: &Search, best: &Proposal, knob: Knob, answer: usize) -> Option<Proposal> {
    let cluster = search.wanted.cluster;
    let mut layout = best.plan.layout.clone();
    match knob {
        Knob::Tensor => layout.tensor = answer,
        Knob::Pipe => layout.pipe = answer,
        Knob::Context => layout.context = answer,
        Knob::Expert => layout.expert = answer,
        Knob::Zero => layout.zero = answer as u8,
        Knob::Recompute => layout.recompute = super::candidate::RECOMPUTES[answer],
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

/// What most of the difference in time between two estimates is.
fn difference(cluster: &Cluster, best: &Estimate, other: &Estimate) -> String {
    let (ours, theirs) = (parts(best), parts(other));
    let grown = |index: &usize| theirs[*index].1 - ours[*index].1;
    let most = (0..ours.len()).max_by(|a, b| grown(a).total_cmp(&grown(b))).unwrap_or(0);
    let (name, seconds) = (theirs[most].0, grown(&most));
    if seconds < 0.002 * best.step_s {
        return "as fast".into();
    }
    let over = link_of(cluster, other, name);
    let far = over.map_or(String::new(), |link| format!(" over {link}"));
    format!("{name}{far} {} more", time(seconds))
}

/// Where the time of a step goes, in seconds.
pub fn parts(estimate: &Estimate) -> [(&'static str, f64); 9] {
    let time = &estimate.time;
    [
        ("computing", time.compute),
        ("waiting for the host", time.host),
        ("tensor exchanges", time.tensor),
        ("context exchanges", time.context),
        ("expert exchanges", time.expert),
        ("data exchanges", time.data),
        ("waiting for other stages", time.bubble),
        ("the optimizer", time.optimizer),
        ("waiting for slower ranks", time.straggling),
    ]
}

/// The link on which the exchanges of that name spend most of their time.
fn link_of<'a>(cluster: &'a Cluster, estimate: &Estimate, name: &str) -> Option<&'a str> {
    let own = |flow: &&Flow| axis_of(flow.kind) == name;
    let most = estimate.flows.iter().filter(own).max_by(|a, b| a.total().total_cmp(&b.total()));
    most.map(|flow| cluster.links[flow.link].name.as_str())
}

fn axis_of(kind: Option<GroupKind>) -> &'static str {
    match kind {
        Some(GroupKind::Tensor | GroupKind::Keys) => "tensor exchanges",
        Some(GroupKind::Context) => "context exchanges",
        Some(GroupKind::Expert) => "expert exchanges",
        Some(GroupKind::Pipe) => "waiting for other stages",
        _ => "data exchanges",
    }
}

/// What limits a layout: where the time goes besides computing, the largest first, and how full the memory is.
pub fn limit(proposal: &Proposal, cluster: &Cluster) -> Vec<String> {
    let estimate = &proposal.estimate;
    let share = |seconds: f64| 100.0 * seconds / estimate.step_s;
    let compute = estimate.time.compute;
    let reached = 100.0 * estimate.hfu * estimate.step_s / compute.max(f64::MIN_POSITIVE);
    let mut lines = vec![format!(
        "computing takes {:.0}% of the step, at {reached:.0}% of the peak",
        share(compute)
    )];
    let mut rest: Vec<(&str, f64)> = parts(estimate).into_iter().skip(1).collect();
    rest.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (name, seconds) in rest.into_iter().filter(|(_, seconds)| share(*seconds) >= 0.5) {
        let over =
            link_of(cluster, estimate, name).map_or(String::new(), |link| format!(" over {link}"));
        let how = if name.ends_with("exchanges") {
            format!("{over} that nothing hides")
        } else {
            String::new()
        };
        lines.push(format!("{name}{how}: {} ({:.1}%)", time(seconds), share(seconds)));
    }
    let left = -proposal.over();
    lines.push(match left >= 0.0 {
        true => format!("the fullest rank has {} left", gib(left)),
        false => format!("the fullest rank is {} over", gib(-left)),
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
        let turns = self.turns.iter().map(|turn| match turn.times {
            None => format!("{}: {}", turn.typed, turn.why),
            Some(times) => format!("{} {:+.1}% ({})", turn.typed, 100.0 * (times - 1.0), turn.why),
        });
        format!("{}: {}", self.typed, turns.collect::<Vec<_>>().join("; "))
    }
}

impl Search<'_> {
    /// All answers to a knob that groups, or their layouts, have.
    pub fn answers(&self, knob: Knob) -> Vec<usize> {
        let mut answers: Vec<usize> = match knob {
            Knob::Zero => vec![0, 1, 2, 3],
            Knob::Schedule => (0..lockstep_plan::schedule::ScheduleKind::ALL.len()).collect(),
            Knob::Chunks => (1..=super::MOST_CHUNKS).collect(),
            Knob::Shard => {
                super::space::divisors(self.wanted.ranks.iter().copied().max().unwrap_or(1))
            }
            _ => self.groups.iter().map(|group| knob.answer(&group.candidate)).collect(),
        };
        answers.sort_unstable();
        answers.dedup();
        answers
    }
}

impl Proposal {
    /// Its value, as a search by this compares it.
    pub fn value(&self, by: Objective) -> f64 {
        value(by, self.plan.ranks, self.estimate.step_s, self.bytes())
    }
}
