//! Resolves `[layout]`: the degrees multiply to the number of ranks and divide the sizes that they shard.

use super::Environment;
use super::checker::{Checker, sized};
use super::limits::MAX_RANKS;
use super::near;
use crate::config::{Offload, Recompute};
use crate::context::{self, ContextKind};
use crate::mesh::{Axis, Mesh};
use crate::model::Shape;
use crate::plan::{Data, Layout, Train};
use crate::schedule::{self, ScheduleKind};

/// Resolves the degrees. `fits` checks them against the model later.
pub(super) fn layout(checker: &mut Checker, env: &Environment) -> Layout {
    let typed = &checker.config.layout;
    let (tensor, context, pipe) =
        (typed.tensor.unwrap_or(1), typed.context.unwrap_or(1), typed.pipe.unwrap_or(1));
    let degrees = [("tensor", tensor), ("context", context), ("pipe", pipe)];
    for (name, degree) in degrees {
        checker.within(&format!("layout.{name}"), degree, MAX_RANKS);
    }
    let data = typed.data.unwrap_or((env.ranks / product_of(&degrees)).max(1));
    checker.within("layout.data", data, MAX_RANKS);
    if [tensor, context, pipe, data].iter().all(|degree| (1..=MAX_RANKS).contains(degree)) {
        product(checker, env.ranks, data, &degrees);
    }
    let schedule = typed.schedule.unwrap_or(match typed.chunks {
        Some(chunks) if chunks > 1 => ScheduleKind::Interleaved,
        _ => ScheduleKind::OneForwardOneBackward,
    });
    let default_chunks = if schedule == ScheduleKind::Interleaved { 2 } else { 1 };
    let (chunks, expert) = (typed.chunks.unwrap_or(default_chunks), typed.expert.unwrap_or(1));
    checker.at_least_one("layout.chunks", chunks);
    checker.within("layout.expert", expert, MAX_RANKS);
    let zero = typed.zero.unwrap_or(0);
    checker.require(zero <= 3, "layout.zero", zero, "be 0, 1, 2 or 3");
    let replicas = data.saturating_mul(context);
    let shard = if zero == 0 { 1 } else { typed.shard.unwrap_or(replicas) };
    if replicas <= MAX_RANKS {
        sharding(checker, zero, replicas);
    }
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
        chunks: if pipe == 1 { 1 } else { chunks },
        expert,
        recompute: typed.recompute.unwrap_or(Recompute::None),
        offload: typed.offload.unwrap_or(Offload::None),
        order: order(checker),
    }
}

/// The order of the axes that the user set, or the default order.
fn order(checker: &mut Checker) -> [Axis; 4] {
    let default = Mesh::ONE.order;
    let Some(typed) = &checker.config.layout.placement else { return default };
    let axis = |word: &str| default.into_iter().find(|axis| axis.name() == word.trim());
    let axes: Vec<Axis> = typed.split(',').filter_map(axis).collect();
    let all = default.iter().all(|axis| axes.contains(axis));
    match <[Axis; 4]>::try_from(axes) {
        Ok(axes) if all && typed.split(',').count() == 4 => axes,
        _ => {
            let message =
                format!("placement must list each of the four axes once (got \"{typed}\")");
            checker.add(
                &["layout.placement"],
                message,
                "write for example \"pipe, data, context, tensor\", innermost last",
            );
            default
        }
    }
}

/// Checks that the degrees multiply to the number of ranks.
fn product(checker: &mut Checker, ranks: usize, data: usize, others: &[(&str, usize)]) {
    let of_others = product_of(others);
    let product = data.saturating_mul(of_others);
    let keys = ["layout.data", "layout.tensor", "layout.context", "layout.pipe"];
    if product > MAX_RANKS {
        let message = format!("the layout has {product} ranks");
        return checker.add(&keys, message, format!("the maximum is {MAX_RANKS}"));
    }
    if product == ranks {
        return;
    }
    let degrees = std::iter::once(("data", data)).chain(others.iter().copied());
    let factors: Vec<String> = degrees
        .filter(|(name, degree)| *degree > 1 || (product == 1 && *name == "data"))
        .map(|(name, degree)| format!("{name}={degree}"))
        .collect();
    let needed = if product == 1 { "1 rank".to_string() } else { format!("{product} ranks") };
    let started = if ranks == 1 { "1 rank was".to_string() } else { format!("{ranks} ranks were") };
    let message = format!("{} needs {needed}, but {started} started", factors.join(" × "));
    let suggestion = match checker.config.layout.data {
        Some(_) if ranks.is_multiple_of(of_others) => {
            format!("use --ranks {product}, or remove data")
        }
        Some(_) => format!("use --ranks {product}"),
        None => format!("use --ranks {}", near::multiples(ranks, of_others)),
    };
    checker.add(&keys, message, suggestion);
}

fn product_of(degrees: &[(&str, usize)]) -> usize {
    degrees.iter().fold(1, |product, (_, degree)| product.saturating_mul((*degree).max(1)))
}

fn sharding(checker: &mut Checker, zero: usize, replicas: usize) {
    let typed = &checker.config.layout;
    let Some(shard) = typed.shard else { return };
    checker.at_least_one("layout.shard", shard);
    if zero == 0 && shard > 1 {
        let message = format!("shard={shard} has no effect with zero=0");
        checker.add(
            &["layout.shard", "layout.zero"],
            message,
            "set zero = 1, 2 or 3, or remove shard",
        );
    } else if shard > 0 && !replicas.is_multiple_of(shard) {
        let message = format!("shard={shard} does not divide data × context = {replicas}");
        let near = near::divisors(shard, replicas);
        checker.add(&["layout.shard", "layout.data"], message, format!("use {near}"));
    }
}

/// Checks that the degrees divide the model, its sequences and its batches.
pub(super) fn fits(
    checker: &mut Checker,
    layout: &Layout,
    shape: &Shape,
    data: &Data,
    train: &Train,
) {
    let Layout { tensor, context, pipe, chunks, expert, .. } = *layout;
    let Shape { heads, kv_heads, .. } = *shape;
    let sizes = [tensor, context, pipe, chunks, expert, layout.data, train.micro_batch, data.seq];
    let ranks = product_of(&[("", layout.data), ("", tensor), ("", context), ("", pipe)]);
    if !sized(&sizes) || ranks > MAX_RANKS {
        return;
    }
    matrices(checker, tensor, shape);
    let cut = |heads: usize| (heads / tensor).max(1);
    if context > 1 && heads.is_multiple_of(tensor) {
        let (heads, keys) = (cut(heads), cut(kv_heads));
        if let Err(why) = context::check(layout.context_kind, context, data.seq, heads, keys) {
            let (message, suggestion) = why.rsplit_once("; ").unwrap_or((&why, "remove context"));
            let message = match message.contains("heads=") && tensor > 1 {
                true => format!("{message} (heads per rank, with tensor={tensor})"),
                false => message.into(),
            };
            checker.add(&["layout.context", "data.seq"], message, suggestion);
        }
    }
    let tokens = train.micro_batch * data.seq / context;
    if layout.sequence && !tokens.is_multiple_of(tensor) {
        let message = format!(
            "sequence=true, but tensor={tensor} does not divide the {tokens} tokens of a micro-batch on one rank"
        );
        let suggestion =
            format!("use micro_batch={}, or sequence=false", train.micro_batch * tensor);
        checker.add(&["layout.sequence", "train.micro_batch"], message, suggestion);
    }
    stages(checker, layout, shape, train);
    experts(checker, layout, shape);
    if layout.offload.activations() {
        offloaded_activations(checker, layout, shape);
    }
}

/// Checks that all activations belong to a dense layer's forward and backward pass.
fn offloaded_activations(checker: &mut Checker, layout: &Layout, shape: &Shape) {
    let name = layout.offload.name();
    if shape.moe.is_some() {
        let message = format!("offload=\"{name}\" does not support a mixture of experts");
        let suggestion = "use offload=\"optimizer+gradients\", or recompute=\"full\"";
        checker.add(&["layout.offload", "model.family"], message, suggestion);
    }
    if layout.pipe > 1 && layout.schedule.splits() {
        let message = format!(
            "offload=\"{name}\" does not support schedule=\"{}\", which keeps activations for deferred weight \
             gradients",
            layout.schedule.name()
        );
        let suggestion = "use schedule=\"1f1b\", or offload=\"optimizer+gradients\"";
        checker.add(&["layout.offload", "layout.schedule"], message, suggestion);
    }
}

fn matrices(checker: &mut Checker, tensor: usize, shape: &Shape) {
    let Shape { heads, kv_heads, ffn, vocab, .. } = *shape;
    // Several ranks may hold the same KV head.
    let keys_fit = |ranks| kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads);
    let lead = shape.lead.map(|lead| ("dense_ffn", lead.ffn));
    let widths = [("ffn", ffn)].into_iter().chain(lead);
    let fits = |ranks: &usize| {
        keys_fit(*ranks) && widths.clone().all(|(_, width)| width.is_multiple_of(*ranks))
    };
    let suggestion = format!("use {}", near::divisors_that(tensor, heads, fits));
    for (name, whole) in [("heads", heads)].into_iter().chain(widths.clone()) {
        if !whole.is_multiple_of(tensor) {
            let message = format!("tensor={tensor} does not divide {name}={whole}");
            checker.add(&["layout.tensor", &format!("model.{name}")], message, &*suggestion);
        }
    }
    if heads.is_multiple_of(tensor) && !keys_fit(tensor) {
        let message = format!("tensor={tensor} and kv_heads={kv_heads}: neither divides the other");
        checker.add(&["layout.tensor", "model.kv_heads"], message, &*suggestion);
    }
    // The vocabulary is 1 if the data could not be opened.
    if tensor > vocab && vocab > 1 {
        let message = format!("tensor={tensor} is more than vocab={vocab}");
        checker.add(&["layout.tensor", "model.vocab"], message, format!("use at most {vocab}"));
    }
}

fn stages(checker: &mut Checker, layout: &Layout, shape: &Shape, train: &Train) {
    let Layout { pipe, chunks, schedule, .. } = *layout;
    if pipe == 1 {
        return;
    }
    let (stages, layers, micros) = (pipe * chunks, shape.layers, train.accumulation);
    if stages > layers {
        let split = match chunks {
            1 => format!("pipe={pipe} stages"),
            _ => format!("pipe={pipe} × chunks={chunks} = {stages} stages"),
        };
        let message = format!("{split} are more than layers={layers}");
        let suggestion = format!("every stage needs a layer: use at most {layers} stages");
        checker.add(&["layout.pipe", "layout.chunks", "model.layers"], message, suggestion);
    }
    // A step without micro-batches has been reported as a batch size error.
    if micros == 0 || schedule::possible(schedule, pipe, chunks, micros).is_ok() {
        return;
    }
    let (message, suggestion) = match schedule {
        ScheduleKind::Interleaved => {
            let round = train.micro_batch * layout.data * pipe;
            let near = near::multiples(train.global_batch, round);
            let message = format!(
                "schedule=interleaved needs a multiple of pipe={pipe} micro-batches per step (got {micros})"
            );
            (message, format!("use global_batch={near}"))
        }
        other => (
            format!("schedule={other} has one stage per rank, but chunks={chunks}"),
            "remove chunks, or set schedule = \"interleaved\"".into(),
        ),
    };
    let keys = ["layout.schedule", "layout.chunks", "layout.pipe", "train.global_batch"];
    checker.add(&keys, message, suggestion);
}

fn experts(checker: &mut Checker, layout: &Layout, shape: &Shape) {
    let Layout { expert, data, context, .. } = *layout;
    let Some(moe) = shape.moe else {
        if expert > 1 {
            let message = format!("expert={expert}, but the model has no experts");
            checker.add(&["layout.expert"], message, "remove it, or set family = \"moe\"");
        }
        return;
    };
    let replicas = data * context;
    for (name, whole) in [("data × context = ", replicas), ("experts=", moe.experts)] {
        if !whole.is_multiple_of(expert) {
            let message = format!("expert={expert} does not divide {name}{whole}");
            let near = near::divisors_that(expert, moe.experts, |&n| replicas.is_multiple_of(n));
            checker.add(&["layout.expert"], message, format!("use {near}"));
        }
    }
    if context > 1 && moe.capacity.is_some() {
        let message = format!(
            "context={context} with capacity: which tokens are dropped would depend on the layout"
        );
        checker.add(
            &["layout.context", "model.capacity"],
            message,
            "remove capacity (dropless routing)",
        );
    }
}

impl Layout {
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
            order: self.order,
        }
    }
}
