//! Resolves `[model]`: keys override the preset, and missing sizes are derived.

use super::checker::{Checker, MOST, sized};
use super::{latent, near};
use crate::config::{Model, nearest};
use crate::model::{Family, Moe, RopeScaling, Shape};
use crate::presets;

const MOST_PARAMETERS: f64 = 1e15;

/// The shape of the model, or None after reporting an error.
pub(super) fn shape(checker: &mut Checker, data_vocab: Option<usize>) -> Option<Shape> {
    let typed = &checker.config.model;
    let base = preset(checker, typed)?;
    let model = typed.over(&base);
    let family = model.family.unwrap_or(Family::Gpt2);
    let dim = model.dim.unwrap_or(128);
    let heads = model.heads.unwrap_or_else(|| default_heads(dim.min(MOST)));
    let layers = model.layers.unwrap_or(4);
    let latent = match family {
        Family::Gpt2 => None,
        _ => latent::latent(checker, &model),
    };
    let own_width = model.head_dim.or(latent.map(|latent| latent.nope.saturating_add(latent.rope)));
    let shape = Shape {
        family,
        vocab: vocab(checker, model.vocab, data_vocab),
        dim,
        layers,
        heads,
        kv_heads: model.kv_heads.unwrap_or(heads.max(1)),
        head_dim: own_width.unwrap_or(dim / heads.max(1)),
        ffn: model.ffn.unwrap_or_else(|| default_ffn(family, dim.clamp(1, MOST))),
        seq: model.seq.unwrap_or(128),
        tied: model.tied.unwrap_or(family == Family::Gpt2),
        norm_eps: model.norm_eps.unwrap_or(1e-5),
        dropout: model.dropout.unwrap_or(0.0),
        rope_theta: model.rope_theta.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(checker, &model, family),
        moe: (family == Family::Moe).then(|| experts(&model)),
        latent,
        lead: match family {
            Family::Moe => latent::lead(checker, &model, layers),
            _ => None,
        },
    };
    sizes(checker, &shape);
    heads_fit(checker, &shape, own_width.is_some());
    numbers(checker, &shape);
    check_parameter_count(checker, &shape);
    check_family(checker, typed, family);
    latent::check_family(checker, typed, family);
    Some(shape)
}

/// The keys of the preset; empty if there is no preset, None if it does not exist.
fn preset(checker: &mut Checker, typed: &Model) -> Option<Model> {
    let Some(name) = &typed.preset else { return Some(Model::default()) };
    let found = presets::find(name);
    if found.is_none() {
        let suggestion = match nearest(name, presets::NAMES.into_iter()) {
            Some(meant) => format!("did you mean \"{meant}\"?"),
            None => format!("presets: {}", presets::NAMES.join(", ")),
        };
        checker.add(&["model.preset"], format!("unknown preset \"{name}\""), suggestion);
    }
    found
}

/// Heads of width 64, or 32 if `dim` is below 256; fewer heads if these would not have an even width.
fn default_heads(dim: usize) -> usize {
    let width = if dim >= 256 { 64 } else { 32 };
    (1..=dim / width).rev().find(|heads| dim.is_multiple_of(2 * heads)).unwrap_or(1)
}

/// 4 × dim; with a gate 8/3 × dim, which gives equally many parameters, rounded up to a multiple of 64.
fn default_ffn(family: Family, dim: usize) -> usize {
    match family {
        Family::Gpt2 => 4 * dim,
        Family::Llama | Family::Moe => (8 * dim).div_ceil(3).next_multiple_of(64),
    }
}

fn vocab(checker: &mut Checker, model: Option<usize>, data: Option<usize>) -> usize {
    match (model, data) {
        (Some(model), Some(data)) if model < data => {
            let message = format!("vocab={model} is less than the vocabulary of the data, {data}");
            checker.add(&["model.vocab"], message, format!("remove it, or use at least {data}"));
            model
        }
        (Some(model), _) => model,
        (None, Some(data)) => data,
        (None, None) => {
            let message = "vocab is not set, and the vocabulary of the data is unknown".to_string();
            checker.add(
                &["model.vocab", "model.preset", "data.source"],
                message,
                "set model.vocab",
            );
            1
        }
    }
}

fn rope_scaling(checker: &mut Checker, model: &Model, family: Family) -> Option<RopeScaling> {
    let scaling = &model.rope_scaling;
    let rest = [
        ("model.rope_scaling.low_freq_factor", scaling.low_freq_factor),
        ("model.rope_scaling.high_freq_factor", scaling.high_freq_factor),
        ("model.rope_scaling.original_seq", scaling.original_seq.map(|seq| seq as f64)),
    ];
    let Some(factor) = scaling.factor.filter(|_| family != Family::Gpt2) else {
        for (key, _) in rest.iter().filter(|(_, value)| value.is_some() && family != Family::Gpt2) {
            let message = "rope_scaling needs a factor".to_string();
            checker.add(
                &[key, "model.rope_scaling.factor"],
                message,
                "set model.rope_scaling.factor",
            );
        }
        return None;
    };
    let scaling = RopeScaling {
        factor,
        low_freq_factor: scaling.low_freq_factor.unwrap_or(1.0),
        high_freq_factor: scaling.high_freq_factor.unwrap_or(4.0),
        original_seq: scaling.original_seq.unwrap_or(8192),
    };
    checker.require(factor > 0.0, "model.rope_scaling.factor", factor, "be greater than 0");
    checker.at_least_one("model.rope_scaling.original_seq", scaling.original_seq);
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    if !(0.0 < low && low < high) {
        let keys = ["model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"];
        let message =
            format!("low_freq_factor={low} and high_freq_factor={high} do not form a range");
        checker.add(&keys, message, "use 0 < low_freq_factor < high_freq_factor");
    }
    Some(scaling)
}

fn experts(model: &Model) -> Moe {
    let experts = model.experts.unwrap_or(8);
    Moe {
        experts,
        top_k: model.top_k.unwrap_or(experts.clamp(1, 2)),
        capacity: model.capacity,
        aux_loss: model.aux_loss.unwrap_or(0.01),
        balance: model.balance.unwrap_or_default(),
        z_loss: model.z_loss.unwrap_or(0.001),
        shared: model.shared_experts.unwrap_or(0),
    }
}

fn sizes(checker: &mut Checker, shape: &Shape) {
    checker.at_least_one("model.dim", shape.dim);
    checker.at_least_one("model.layers", shape.layers);
    checker.at_least_one("model.heads", shape.heads);
    checker.at_least_one("model.kv_heads", shape.kv_heads);
    checker.at_least_one("model.ffn", shape.ffn);
    checker.at_least_one("model.vocab", shape.vocab);
    checker.at_least_one("model.seq", shape.seq);
    if let Some(moe) = shape.moe {
        checker.at_least_one("model.experts", moe.experts);
        checker.at_least_one("model.top_k", moe.top_k);
        if moe.shared > 0 {
            checker.at_least_one("model.shared_experts", moe.shared);
        }
    }
}

/// Limits the number of parameters, so that no later calculation overflows.
fn check_parameter_count(checker: &mut Checker, shape: &Shape) {
    let float = |size: usize| size as f64;
    let experts = shape.moe.map_or(1.0, |moe| float(moe.experts) + float(moe.shared));
    let head = float(shape.head_dim) + float(shape.value_dim());
    let heads = float(shape.heads) + float(shape.kv_heads);
    let latents = shape.latent.map_or(0.0, |latent| {
        let ranks = float(latent.q_rank.unwrap_or(0)) + float(latent.kv_rank);
        ranks * (float(shape.dim) + heads * head)
    });
    let attention = float(shape.dim) * head * heads + latents;
    let wide = float(shape.ffn) * experts + shape.lead.map_or(0.0, |lead| float(lead.ffn));
    let layer = attention + 3.0 * float(shape.dim) * wide;
    let ends = float(shape.dim) * (2.0 * float(shape.vocab) + float(shape.seq));
    let all = float(shape.layers) * layer + ends;
    if all > MOST_PARAMETERS {
        let keys =
            ["model.dim", "model.layers", "model.ffn", "model.heads", "model.vocab", "model.seq"];
        let message = format!("the model has {all:.1e} parameters");
        checker.add(&keys, message, format!("the maximum is {MOST_PARAMETERS:e}"));
    }
}

/// `own_width`: the head width is set explicitly and need not be dim / heads.
fn heads_fit(checker: &mut Checker, shape: &Shape, own_width: bool) {
    let Shape { dim, heads, kv_heads, head_dim, .. } = *shape;
    if !sized(&[dim, heads, kv_heads]) {
        return;
    }
    if !own_width && !dim.is_multiple_of(heads) {
        let message = format!("heads={heads} does not divide dim={dim}");
        checker.add(
            &["model.heads", "model.dim"],
            message,
            format!("use {}", near::divisors(heads, dim)),
        );
    } else if head_dim == 0 {
        checker.at_least_one("model.head_dim", head_dim);
    } else if shape.family != Family::Gpt2 && head_dim % 2 == 1 {
        let message = format!("head_dim={head_dim} is odd, but rotary positions rotate pairs");
        checker.add(
            &["model.head_dim", "model.heads", "model.dim"],
            message,
            "use an even head_dim",
        );
    }
    if !heads.is_multiple_of(kv_heads) {
        let message = format!("kv_heads={kv_heads} does not divide heads={heads}");
        let suggestion = format!("use {}", near::divisors(kv_heads, heads));
        checker.add(&["model.kv_heads", "model.heads"], message, suggestion);
    }
}

fn numbers(checker: &mut Checker, shape: &Shape) {
    let Shape { norm_eps, dropout, rope_theta, .. } = *shape;
    checker.require(norm_eps > 0.0, "model.norm_eps", norm_eps, "be greater than 0");
    checker.require(
        (0.0..1.0).contains(&dropout),
        "model.dropout",
        dropout,
        "be at least 0 and less than 1",
    );
    checker.require(rope_theta > 1.0, "model.rope_theta", rope_theta, "be greater than 1");
    let Some(moe) = shape.moe else { return };
    if moe.top_k > moe.experts && moe.experts > 0 {
        let message = format!("top_k={} is more than experts={}", moe.top_k, moe.experts);
        checker.add(
            &["model.top_k", "model.experts"],
            message,
            format!("use at most {}", moe.experts),
        );
    }
    if let Some(capacity) = moe.capacity {
        checker.require(
            capacity > 0.0,
            "model.capacity",
            capacity,
            "be greater than 0, or removed for dropless routing",
        );
    }
    checker.require(moe.aux_loss >= 0.0, "model.aux_loss", moe.aux_loss, "be at least 0");
    checker.require(moe.z_loss >= 0.0, "model.z_loss", moe.z_loss, "be at least 0");
}

/// Reports keys that the family does not use. Unused keys of a preset are ignored.
fn check_family(checker: &mut Checker, typed: &Model, family: Family) {
    let experts = [
        ("experts", typed.experts.is_some()),
        ("top_k", typed.top_k.is_some()),
        ("capacity", typed.capacity.is_some()),
        ("aux_loss", typed.aux_loss.is_some()),
        ("balance", typed.balance.is_some()),
        ("z_loss", typed.z_loss.is_some()),
        ("shared_experts", typed.shared_experts.is_some()),
    ];
    for (name, _) in experts.into_iter().filter(|(_, typed)| *typed && family != Family::Moe) {
        let message =
            format!("{name} is only used with family = \"moe\" (got \"{}\")", family_name(family));
        checker.add(
            &[&format!("model.{name}"), "model.family"],
            message,
            "set family = \"moe\" or remove it",
        );
    }
    let rope = [
        ("rope_theta", typed.rope_theta.is_some()),
        ("rope_scaling.factor", typed.rope_scaling.factor.is_some()),
    ];
    for (name, _) in rope.into_iter().filter(|(_, typed)| *typed && family == Family::Gpt2) {
        let message = format!("{name} requires rotary positions, but gpt2 has learned positions");
        checker.add(
            &[&format!("model.{name}"), "model.family"],
            message,
            "set family = \"llama\" or remove it",
        );
    }
}

fn family_name(family: Family) -> &'static str {
    match family {
        Family::Gpt2 => "gpt2",
        Family::Llama => "llama",
        Family::Moe => "moe",
    }
}
