//! A candidate layout and its knobs.

use lockstep_plan::context::ContextKind;
use lockstep_plan::schedule::ScheduleKind;
use lockstep_plan::{Axis, Config, Layout, Mesh, Offload, Plan, Recompute};

/// Everything that the search may choose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    pub ranks: usize,
    pub micro_batch: usize,
    pub layout: Layout,
}

/// A setting of a layout. Values are numbers; for settings with named choices, the index of the choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Knob {
    Ranks,
    Data,
    Tensor,
    Context,
    Pipe,
    Expert,
    MicroBatch,
    Sequence,
    ContextKind,
    Recompute,
    Zero,
    Shard,
    Schedule,
    Chunks,
}

impl Knob {
    /// Knobs that are explained to the user, in this order.
    pub const REPORTED: [Knob; 10] = [
        Knob::Tensor,
        Knob::Pipe,
        Knob::Data,
        Knob::Context,
        Knob::Expert,
        Knob::Zero,
        Knob::Recompute,
        Knob::Schedule,
        Knob::MicroBatch,
        Knob::Sequence,
    ];

    /// Whether the knob is fixed for a group of candidates, before ZeRO level and schedule are chosen.
    pub(super) fn fixed_in_group(self) -> bool {
        !matches!(self, Knob::Zero | Knob::Shard | Knob::Schedule | Knob::Chunks)
    }

    pub fn name(self) -> &'static str {
        match self {
            Knob::Ranks => "ranks",
            Knob::Data => "data",
            Knob::Tensor => "tensor",
            Knob::Context => "context",
            Knob::Pipe => "pipe",
            Knob::Expert => "expert",
            Knob::MicroBatch => "micro_batch",
            Knob::Sequence => "sequence",
            Knob::ContextKind => "context_kind",
            Knob::Recompute => "recompute",
            Knob::Zero => "zero",
            Knob::Shard => "shard",
            Knob::Schedule => "schedule",
            Knob::Chunks => "chunks",
        }
    }

    pub fn of(self, plan: &Plan) -> usize {
        let (micro_batch, layout) = (plan.train.micro_batch, plan.layout.clone());
        self.value(&Candidate { ranks: plan.ranks, micro_batch, layout })
    }

    pub(super) fn value(self, candidate: &Candidate) -> usize {
        let layout = &candidate.layout;
        match self {
            Knob::Ranks => candidate.ranks,
            Knob::Data => layout.data,
            Knob::Tensor => layout.tensor,
            Knob::Context => layout.context,
            Knob::Pipe => layout.pipe,
            Knob::Expert => layout.expert,
            Knob::MicroBatch => candidate.micro_batch,
            Knob::Sequence => usize::from(layout.sequence),
            Knob::ContextKind => {
                KINDS.iter().position(|kind| *kind == layout.context_kind).unwrap_or(0)
            }
            Knob::Recompute => {
                RECOMPUTES.iter().position(|how| *how == layout.recompute).unwrap_or(0)
            }
            Knob::Zero => usize::from(layout.zero),
            Knob::Shard => layout.shard,
            Knob::Schedule => {
                ScheduleKind::ALL.iter().position(|kind| *kind == layout.schedule).unwrap_or(0)
            }
            Knob::Chunks => layout.chunks,
        }
    }

    /// `tensor=8`, `recompute=full`.
    pub fn setting(self, value: usize) -> String {
        let word = match self {
            Knob::Sequence => (value == 1).to_string(),
            Knob::ContextKind => kind_word(KINDS[value]).into(),
            Knob::Recompute => recompute_word(RECOMPUTES[value]).into(),
            Knob::Schedule => ScheduleKind::ALL[value].to_string(),
            _ => value.to_string(),
        };
        format!("{}={word}", self.name())
    }
}

pub(super) const KINDS: [ContextKind; 3] =
    [ContextKind::Ring, ContextKind::Ulysses, ContextKind::Both];
pub(super) const RECOMPUTES: [Recompute; 3] =
    [Recompute::None, Recompute::Selective, Recompute::Full];

fn kind_word(kind: ContextKind) -> &'static str {
    match kind {
        ContextKind::Ring => "ring",
        ContextKind::Ulysses => "ulysses",
        ContextKind::Both => "both",
    }
}

fn recompute_word(how: Recompute) -> &'static str {
    match how {
        Recompute::None => "none",
        Recompute::Cheap => "cheap",
        Recompute::Selective => "selective",
        Recompute::Full => "full",
    }
}

/// A layout in the syntax of a run file, without defaults:
/// `data=8 zero=1 tensor=8 sequence=true pipe=6`.
pub fn layout_words(plan: &Plan) -> String {
    let layout = &plan.layout;
    let replicas = layout.data * layout.context;
    let mut words = Vec::new();
    let mut say = |said: bool, word: String| words.extend(said.then_some(word));
    say(layout.data > 1 || plan.ranks == 1, format!("data={}", layout.data));
    say(layout.zero > 0, format!("zero={}", layout.zero));
    say(layout.zero > 0 && layout.shard < replicas, format!("shard={}", layout.shard));
    say(layout.zero == 3 && layout.keep_gathered, "keep_gathered=true".into());
    say(layout.tensor > 1, format!("tensor={}", layout.tensor));
    say(layout.sequence, "sequence=true".into());
    say(layout.context > 1, format!("context={}", layout.context));
    let kind = kind_word(layout.context_kind);
    say(layout.context > 1 && kind != "ring", format!("context_kind={kind}"));
    say(layout.pipe > 1, format!("pipe={}", layout.pipe));
    let plain = layout.schedule == ScheduleKind::OneForwardOneBackward;
    say(layout.pipe > 1 && !plain, format!("schedule={}", layout.schedule));
    say(layout.pipe > 1 && layout.chunks > 1, format!("chunks={}", layout.chunks));
    say(layout.expert > 1, format!("expert={}", layout.expert));
    let how = recompute_word(layout.recompute);
    say(layout.recompute != Recompute::None, format!("recompute={how}"));
    let offload = layout.offload.name();
    say(layout.offload != Offload::None, format!("offload={offload}"));
    // Shown only if it matters: the position of an axis of size 1 does not.
    let mesh = plan.mesh();
    let long = |order: [Axis; 4]| {
        order.into_iter().filter(|axis| mesh.size(*axis) > 1).collect::<Vec<_>>()
    };
    let order: Vec<&str> = layout.order.iter().map(|axis| axis.name()).collect();
    let usual = long(layout.order) == long(Mesh::ONE.order);
    say(!usual, format!("placement=\"{}\"", order.join(",")));
    words.join(" ")
}

impl Candidate {
    /// The config with this layout.
    pub(super) fn typed(&self, config: &Config) -> Config {
        let layout = &self.layout;
        let order: Vec<&str> = layout.order.iter().map(|axis| axis.name()).collect();
        let mut config = config.clone();
        config.train.micro_batch = Some(self.micro_batch);
        config.layout = lockstep_plan::config::Layout {
            data: Some(layout.data),
            zero: Some(usize::from(layout.zero)),
            shard: (layout.zero > 0).then_some(layout.shard),
            keep_gathered: Some(layout.keep_gathered),
            tensor: Some(layout.tensor),
            sequence: Some(layout.sequence),
            context: Some(layout.context),
            context_kind: Some(layout.context_kind),
            pipe: Some(layout.pipe),
            schedule: Some(layout.schedule),
            chunks: Some(layout.chunks),
            expert: Some(layout.expert),
            recompute: Some(layout.recompute),
            offload: Some(layout.offload),
            placement: Some(order.join(",")),
        };
        config
    }

    /// Writes the layout into a scratch plan; sets only what the bounds read.
    pub(super) fn write_to(&self, plan: &mut Plan) {
        plan.ranks = self.ranks;
        plan.layout = self.layout.clone();
        plan.train.micro_batch = self.micro_batch;
        plan.train.accumulation = plan.train.global_batch / self.micro_batch / self.layout.data;
    }
}
