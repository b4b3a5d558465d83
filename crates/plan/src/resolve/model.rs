//! Resolves `[model]`: keys override the preset, which overrides the model of the checkpoint that a run starts from.
//! Missing sizes are derived.

use super::checker::{Checker, MOST, sized};
use super::{latent, near};
use crate::config::{Model, nearest};
use crate::model::{Family, Moe, RopeScaling, Shape};
use crate::presets;

/// The shape of the model, or None after reporting an error.
pub(super) fn shape(checker: &mut Checker, data_vocab: Option<usize>) -> Option<Shape> {
    let typed = &checker.config.model;
    let (named, base) = (preset(checker, typed)?, &checker.config.base);
    // A checkpoint was trained with its own loss terms, not with those of the preset.
    let model = typed.over(&base.router()).over(&named).over(base);
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
    check_shape(checker, &shape, own_width.is_some());
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
            let suggestion = match checker.config.base.vocab == Some(model) {
                true => "prepare the data with the tokenizer of the checkpoint".into(),
                false => format!("remove it, or use at least {data}"),
            };
            checker.add(&["model.vocab"], message, suggestion);
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
    Some(RopeScaling {
        factor,
        low_freq_factor: scaling.low_freq_factor.unwrap_or(1.0),
        high_freq_factor: scaling.high_freq_factor.unwrap_or(4.0),
        original_seq: scaling.original_seq.unwrap_or(8192),
    })
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

/// Checks the shape. `own_width`: the head width is set explicitly and need not be dim / heads.
fn check_shape(checker: &mut Checker, shape: &Shape, own_width: bool) {
    let Shape { dim, heads, kv_heads, .. } = *shape;
    let uneven = !own_width && sized(&[dim, heads, kv_heads]) && !dim.is_multiple_of(heads);
    if uneven {
        let message = format!("heads={heads} does not divide dim={dim}");
        let suggestion = format!("use {}", near::divisors(heads, dim));
        checker.add(&["model.heads", "model.dim"], message, suggestion);
    }
    for error in shape.errors() {
        // The width of uneven heads is not what the user meant.
        if !uneven || error.keys[0] != "head_dim" {
            let keys: Vec<String> = error.keys.iter().map(|key| format!("model.{key}")).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            checker.add(&keys, error.message, error.suggestion);
        }
    }
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
            format!("{name} is only used with family = \"moe\" (got \"{}\")", family.name());
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
