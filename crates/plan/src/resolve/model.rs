//! The model's shape: preset under typed keys, and what follows from both.

use super::checker::{Checker, MOST, sized};
use super::{latent, near};
use crate::config::{Model, nearest};
use crate::model::{Family, Moe, RopeScaling, Shape};
use crate::presets;

const MOST_PARAMETERS: f64 = 1e15;

/// None when it cannot be said, which is then a mistake.
pub(super) fn shape(checker: &mut Checker, data_vocab: Option<usize>) -> Option<Shape> {
    let typed = &checker.config.model;
    let base = preset(checker, typed)?;
    let model = typed.over(&base);
    let family = model.family.unwrap_or(Family::Gpt2);
    let dim = model.dim.unwrap_or(128);
    let heads = model.heads.unwrap_or_else(|| usual_heads(dim.min(MOST)));
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
        ffn: model.ffn.unwrap_or_else(|| usual_ffn(family, dim.clamp(1, MOST))),
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
    parameters_can_be_counted(checker, &shape);
    of_other_families(checker, typed, family);
    latent::of_family(checker, typed, family);
    Some(shape)
}

/// The preset's keys; none where there is no preset.
fn preset(checker: &mut Checker, typed: &Model) -> Option<Model> {
    let Some(name) = &typed.preset else { return Some(Model::default()) };
    let found = presets::find(name);
    if found.is_none() {
        let suggestion = match nearest(name, presets::NAMES.into_iter()) {
            Some(meant) => format!("did you mean \"{meant}\"?"),
            None => format!("there are {}", presets::NAMES.join(", ")),
        };
        checker.add(&["model.preset"], format!("no preset is called \"{name}\""), suggestion);
    }
    found
}

/// Heads 64 wide, 32 in narrow models; fewer where that does not divide into even widths.
fn usual_heads(dim: usize) -> usize {
    let width = if dim >= 256 { 64 } else { 32 };
    (1..=dim / width).rev().find(|heads| dim.is_multiple_of(2 * heads)).unwrap_or(1)
}

/// Four times the width for one matrix up and one down; with a gate, two thirds of that for as many
/// parameters, rounded up to a multiple of 64.
fn usual_ffn(family: Family, dim: usize) -> usize {
    match family {
        Family::Gpt2 => 4 * dim,
        Family::Llama | Family::Moe => (8 * dim).div_ceil(3).next_multiple_of(64),
    }
}

fn vocab(checker: &mut Checker, model: Option<usize>, data: Option<usize>) -> usize {
    match (model, data) {
        (Some(model), Some(data)) if model < data => {
            let message = format!("vocab={model} is less than the {data} of the data");
            checker.add(&["model.vocab"], message, format!("leave it out, or say {data} or more"));
            model
        }
        (Some(model), _) => model,
        (None, Some(data)) => data,
        (None, None) => {
            let message = "vocab is not given, and the data does not say it".to_string();
            checker.add(
                &["model.vocab", "model.preset", "data.source"],
                message,
                "give model.vocab",
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
            let message = "rope_scaling has no factor".to_string();
            checker.add(
                &[key, "model.rope_scaling.factor"],
                message,
                "give model.rope_scaling.factor",
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
    checker.require(factor > 0.0, "model.rope_scaling.factor", factor, "it must be more than 0");
    checker.at_least_one("model.rope_scaling.original_seq", scaling.original_seq);
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    if !(0.0 < low && low < high) {
        let keys = ["model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"];
        let message =
            format!("low_freq_factor={low} and high_freq_factor={high} leave nothing between them");
        checker.add(&keys, message, "low_freq_factor must be above 0 and below high_freq_factor");
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

/// Nothing here, and nobody who counts later, shall overflow.
fn parameters_can_be_counted(checker: &mut Checker, shape: &Shape) {
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
        let message = format!("this makes {all:.1e} parameters");
        checker.add(&keys, message, format!("{MOST_PARAMETERS:e} is the most that is counted"));
    }
}

/// `own_width`: the width of a head is given, and need not follow from the model's.
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
            format!("try {}", near::divisors(heads, dim)),
        );
    } else if head_dim == 0 {
        checker.at_least_one("model.head_dim", head_dim);
    } else if shape.family != Family::Gpt2 && head_dim % 2 == 1 {
        let message = format!("head_dim={head_dim} is odd, and rotary positions turn pairs");
        checker.add(&["model.head_dim", "model.heads", "model.dim"], message, "it must be even");
    }
    if !heads.is_multiple_of(kv_heads) {
        let message = format!("kv_heads={kv_heads} does not divide heads={heads}");
        let suggestion = format!("try {}", near::divisors(kv_heads, heads));
        checker.add(&["model.kv_heads", "model.heads"], message, suggestion);
    }
}

fn numbers(checker: &mut Checker, shape: &Shape) {
    let Shape { norm_eps, dropout, rope_theta, .. } = *shape;
    checker.require(norm_eps > 0.0, "model.norm_eps", norm_eps, "it must be more than 0");
    checker.require(
        (0.0..1.0).contains(&dropout),
        "model.dropout",
        dropout,
        "it must be from 0 to below 1",
    );
    checker.require(rope_theta > 1.0, "model.rope_theta", rope_theta, "it must be more than 1");
    let Some(moe) = shape.moe else { return };
    if moe.top_k > moe.experts && moe.experts > 0 {
        let message = format!("top_k={} is more than experts={}", moe.top_k, moe.experts);
        checker.add(
            &["model.top_k", "model.experts"],
            message,
            format!("say at most {}", moe.experts),
        );
    }
    if let Some(capacity) = moe.capacity {
        checker.require(
            capacity > 0.0,
            "model.capacity",
            capacity,
            "say more than 0, or leave it out to drop none",
        );
    }
    checker.require(moe.aux_loss >= 0.0, "model.aux_loss", moe.aux_loss, "it must be at least 0");
    checker.require(moe.z_loss >= 0.0, "model.z_loss", moe.z_loss, "it must be at least 0");
}

/// Keys that were typed and that the family has no use for. A preset's are just left out.
fn of_other_families(checker: &mut Checker, typed: &Model, family: Family) {
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
        let message = format!("{name} is for the moe family, and this is {}", family_name(family));
        checker.add(
            &[&format!("model.{name}"), "model.family"],
            message,
            "say family = \"moe\", or leave it out",
        );
    }
    let rope = [
        ("rope_theta", typed.rope_theta.is_some()),
        ("rope_scaling.factor", typed.rope_scaling.factor.is_some()),
    ];
    for (name, _) in rope.into_iter().filter(|(_, typed)| *typed && family == Family::Gpt2) {
        let message = format!("{name} is for rotary positions, and gpt2 learns its positions");
        checker.add(
            &[&format!("model.{name}"), "model.family"],
            message,
            "say family = \"llama\", or leave it out",
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
