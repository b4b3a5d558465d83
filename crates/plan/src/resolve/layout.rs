//! How the ranks share the work: degrees that multiply to the ranks and divide what they cut.

use super::Surroundings;
use super::findings::{Findings, sized};
use super::near;
use crate::config::Recompute;
use crate::context::{self, ContextKind};
use crate::mesh::Mesh;
use crate::model::Shape;
use crate::plan::{Data, Layout, Train};
use crate::schedule::{Kind, Schedule};

/// The degrees alone: what they cut is looked at when it is known.
pub(super) fn layout(findings: &mut Findings, around: &Surroundings) -> Layout {
    let typed = &findings.config.layout;
    let (tensor, context, pipe) =
        (typed.tensor.unwrap_or(1), typed.context.unwrap_or(1), typed.pipe.unwrap_or(1));
    let degrees = [("tensor", tensor), ("context", context), ("pipe", pipe)];
    for (name, degree) in degrees {
        findings.at_least_one(&format!("layout.{name}"), degree);
    }
    let others: usize = degrees.iter().map(|(_, degree)| (*degree).clamp(1, 1 << 20)).product();
    let data = typed.data.unwrap_or((around.ranks / others).max(1));
    findings.at_least_one("layout.data", data);
    if sized(&[tensor, context, pipe, data]) {
        product(findings, around.ranks, data, &degrees);
    }
    let schedule = typed.schedule.unwrap_or(match typed.chunks {
        Some(chunks) if chunks > 1 => Kind::Interleaved,
        _ => Kind::OneForwardOneBackward,
    });
    let usual_chunks = if schedule == Kind::Interleaved { 2 } else { 1 };
    let zero = typed.zero.unwrap_or(0);
    findings.require(zero <= 3, "layout.zero", zero, "ZeRO has the stages 0, 1, 2 and 3");
    let replicas = data.saturating_mul(context);
    let shard = if zero == 0 { 1 } else { typed.shard.unwrap_or(replicas) };
    sharding(findings, zero, replicas);
    Layout {
        data,
        zero: zero.min(3) as u8,
        shard: shard.max(1),
        keep_gathered: typed.keep_gathered.unwrap_or(false),
        tensor,
        sequence: typed.sequence.unwrap_or(false) && tensor > 1,
        context,
        context_kind: typed.context_kind.unwrap_or(ContextKind::Ring),
        pipe,
        schedule,
        chunks: if pipe == 1 { 1 } else { typed.chunks.unwrap_or(usual_chunks).max(1) },
        expert: typed.expert.unwrap_or(1).max(1),
        recompute: typed.recompute.unwrap_or(Recompute::None),
    }
}

/// Every rank has a place, and every place a rank.
fn product(findings: &mut Findings, ranks: usize, data: usize, degrees: &[(&str, usize)]) {
    let product = degrees.iter().fold(data, |product, (_, degree)| product.saturating_mul(*degree));
    if product == ranks {
        return;
    }
    let started = if ranks == 1 { "1 rank is".to_string() } else { format!("{ranks} ranks are") };
    let factors: Vec<String> = std::iter::once(("data", data))
        .chain(degrees.iter().copied())
        .filter(|(name, degree)| *degree > 1 || *name == "data")
        .map(|(name, degree)| format!("{name}={degree}"))
        .collect();
    let takes = if product == 1 { "1 rank".to_string() } else { format!("{product} ranks") };
    let what = format!("{} takes {takes}, but {started} started", factors.join(" × "));
    let keys = ["layout.data", "layout.tensor", "layout.context", "layout.pipe"];
    let way_out = match findings.config.layout.data {
        Some(_) => format!("start with --ranks {product}, or leave data out"),
        None => format!("start with --ranks {product}"),
    };
    findings.add(&keys, what, way_out);
}

fn sharding(findings: &mut Findings, zero: usize, replicas: usize) {
    let typed = &findings.config.layout;
    let Some(shard) = typed.shard else { return };
    findings.at_least_one("layout.shard", shard);
    if zero == 0 && shard > 1 {
        let what = format!("shard={shard}, but zero=0 cuts nothing");
        findings.add(
            &["layout.shard", "layout.zero"],
            what,
            "say zero = 1, 2 or 3, or leave it out",
        );
    } else if shard > 0 && !replicas.is_multiple_of(shard) {
        let what = format!("shard={shard} does not divide data × context = {replicas}");
        let near = near::divisors(shard, replicas);
        findings.add(&["layout.shard", "layout.data"], what, format!("try {near}"));
    }
}

/// Whether the model, its sequences and its batches can be cut like this.
pub(super) fn fits(
    findings: &mut Findings,
    layout: &Layout,
    shape: &Shape,
    data: &Data,
    train: &Train,
) {
    let Layout { tensor, context, pipe, .. } = *layout;
    if !sized(&[tensor, context, pipe, layout.data, train.micro_batch, data.seq]) {
        return;
    }
    heads(findings, tensor, shape);
    let cut = |heads: usize| (heads / tensor).max(1);
    if context > 1 && shape.heads.is_multiple_of(tensor) {
        let (heads, keys) = (cut(shape.heads), cut(shape.kv_heads));
        if let Err(why) = context::check(layout.context_kind, context, data.seq, heads, keys) {
            let (what, way_out) = why.rsplit_once("; ").unwrap_or((&why, "leave context out"));
            findings.add(&["layout.context", "data.seq"], what.into(), way_out);
        }
    }
    let tokens = train.micro_batch * data.seq / context;
    if layout.sequence && !tokens.is_multiple_of(tensor) {
        let what = format!(
            "sequence=true cuts the {tokens} tokens of a micro-batch in tensor={tensor} equal parts"
        );
        let way_out =
            format!("try micro_batch={}, or sequence = false", train.micro_batch * tensor);
        findings.add(&["layout.sequence", "train.micro_batch"], what, way_out);
    }
    stages(findings, layout, shape, train.accumulation);
    experts(findings, layout, shape);
}

fn heads(findings: &mut Findings, tensor: usize, shape: &Shape) {
    for (name, whole) in [("heads", shape.heads), ("ffn", shape.ffn)] {
        if !whole.is_multiple_of(tensor) {
            let what = format!("tensor={tensor} does not divide {name}={whole}");
            let near = near::divisors(tensor, whole);
            findings.add(&["layout.tensor", &format!("model.{name}")], what, format!("try {near}"));
        }
    }
    let keys = shape.kv_heads;
    if !keys.is_multiple_of(tensor) && !tensor.is_multiple_of(keys) {
        let what = format!("tensor={tensor} and kv_heads={keys}: neither divides the other");
        let near = near::divisors(tensor, keys);
        findings.add(&["layout.tensor", "model.kv_heads"], what, format!("try {near}"));
    }
    if tensor > shape.vocab {
        let what = format!("tensor={tensor} is more than vocab={}", shape.vocab);
        findings.add(&["layout.tensor"], what, "take fewer");
    }
}

fn stages(findings: &mut Findings, layout: &Layout, shape: &Shape, micros: usize) {
    let Layout { pipe, chunks, schedule, .. } = *layout;
    if pipe == 1 {
        return;
    }
    let stages = pipe * chunks;
    if stages > shape.layers {
        let what =
            format!("pipe={pipe} × chunks={chunks} = {stages} stages, but layers={}", shape.layers);
        let way_out =
            format!("a stage has at least one layer; take at most {} stages", shape.layers);
        findings.add(&["layout.pipe", "layout.chunks"], what, way_out);
    }
    if let Err(why) = Schedule::new(schedule, pipe, chunks, micros.max(1)) {
        let why = why.replace("micros", "micro-batches per step").replace("ranks=", "pipe=");
        let (what, way_out) = why.rsplit_once("; ").unwrap_or((&why, "take another schedule"));
        let keys = ["layout.schedule", "layout.chunks", "layout.pipe", "train.global_batch"];
        findings.add(&keys, what.into(), way_out);
    }
}

fn experts(findings: &mut Findings, layout: &Layout, shape: &Shape) {
    let Layout { expert, data, context, .. } = *layout;
    let Some(moe) = shape.moe else {
        if expert > 1 {
            let what = format!("expert={expert}, but the model has no experts");
            findings.add(&["layout.expert"], what, "leave it out, or say family = \"moe\"");
        }
        return;
    };
    for (name, whole) in [("data × context", data * context), ("experts", moe.experts)] {
        if !whole.is_multiple_of(expert) {
            let what = format!("expert={expert} does not divide {name}={whole}");
            let near = near::divisors(expert, whole);
            findings.add(&["layout.expert"], what, format!("try {near}"));
        }
    }
    if context > 1 && moe.capacity.is_some() {
        let what = format!(
            "context={context} cuts sequences, and with capacity which tokens are dropped would depend on it"
        );
        findings.add(&["layout.context", "model.capacity"], what, "leave capacity out (dropless)");
    }
}

impl Layout {
    /// Where its ranks stand.
    pub fn mesh(&self, shape: &Shape) -> Mesh {
        let heads = |heads: usize| (heads / self.tensor).max(1);
        let (ulysses, _) = context::degrees(
            self.context_kind,
            self.context,
            heads(shape.heads),
            heads(shape.kv_heads),
        );
        Mesh {
            pipe: self.pipe,
            data: self.data,
            context: self.context,
            tensor: self.tensor,
            expert: self.expert,
            shard: self.shard,
            ulysses,
            keys: (self.tensor / shape.kv_heads).max(1),
            ..Mesh::ONE
        }
    }
}
