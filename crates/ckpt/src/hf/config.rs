//! Converts between `config.json` and `Shape`. Unsupported settings are reported, never ignored.

use lockstep_plan::model::{Balance, Family, MAX_SIZE, Moe, RopeScaling, Shape};
use serde_json::{Value, json};

/// Parses a `config.json`, or returns everything that is not supported.
pub fn read(config: &Value) -> Result<Shape, Vec<String>> {
    let mut keys = Keys { config, problems: Vec::new() };
    if !config["quantization_config"].is_null() {
        keys.problems.push(
            "quantization_config: quantized weights are not supported; use the original model"
                .into(),
        );
    }
    let shape = match config["model_type"].as_str() {
        Some("gpt2") => gpt2(&mut keys),
        Some("llama") => llama(&mut keys, Family::Llama),
        Some("mixtral") => llama(&mut keys, Family::Moe),
        other => {
            let found = other.unwrap_or("missing");
            return Err(vec![format!(
                "model_type {found} is not supported; use gpt2, llama or mixtral"
            )]);
        }
    };
    // Invalid keys have defaults that may not fit each other.
    if keys.problems.is_empty() {
        keys.problems.extend(shape.errors().iter().map(ToString::to_string));
    }
    match keys.problems.is_empty() {
        true => Ok(shape),
        false => Err(keys.problems),
    }
}

/// The `config.json` for transformers. Dropout outside attention and the router's z-loss only affect training and have
/// no key for Llama and Mixtral; they are not written.
pub fn write(shape: &Shape, dtype: &str) -> Result<Value, Vec<String>> {
    let problems = unsupported(shape);
    if !problems.is_empty() {
        return Err(problems);
    }
    let mut config = match shape.family {
        Family::Gpt2 => gpt2_json(shape),
        Family::Llama | Family::Moe => llama_json(shape),
    };
    // transformers 4 reads torch_dtype, version 5 dtype. Special tokens may be unknown, and the library defaults would
    // belong to another vocabulary.
    let common = json!({
        "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied, "torch_dtype": dtype, "dtype": dtype,
        "bos_token_id": null, "eos_token_id": null, "use_cache": true,
    });
    merge(&mut config, common);
    Ok(config)
}

/// Reasons why transformers has no model for a shape.
fn unsupported(shape: &Shape) -> Vec<String> {
    let Shape { dim, heads, kv_heads, head_dim, .. } = *shape;
    let mut problems = Vec::new();
    let mut reject = |when: bool, why: String| {
        if when {
            problems.push(why);
        }
    };
    match shape.family {
        Family::Gpt2 => {
            reject(
                kv_heads != heads,
                format!("kv_heads={kv_heads} must equal heads={heads} for GPT-2"),
            );
            reject(
                head_dim * heads != dim,
                format!("heads={heads} × head_dim={head_dim} must equal dim={dim} for GPT-2"),
            );
        }
        Family::Llama | Family::Moe => {
            reject(
                dim % heads != 0,
                format!("heads={heads} must divide dim={dim} for transformers"),
            );
        }
    }
    let moe = shape.moe.filter(|_| shape.family == Family::Moe);
    reject(
        shape.family == Family::Moe && moe.is_none(),
        "family=moe without experts; use family=llama".into(),
    );
    let shared = moe.map_or(0, |moe| moe.shared);
    reject(shared > 0, format!("shared_experts={shared}: Mixtral has no shared experts"));
    let capacity = moe.and_then(|moe| moe.capacity);
    reject(
        capacity.is_some(),
        format!(
            "capacity={}: Mixtral's experts take all their tokens, so it would answer otherwise wherever one was \
             dropped; train some steps without capacity first",
            capacity.unwrap_or_default()
        ),
    );
    problems
}

fn gpt2(keys: &mut Keys) -> Shape {
    let (dim, heads) = (keys.size("n_embd", None), keys.size("n_head", None));
    keys.divides("n_head", heads, "n_embd", dim);
    keys.only("activation_function", &["gelu_new", "gelu_pytorch_tanh"], "gelu_new");
    keys.only_bool("scale_attn_weights", true, true);
    keys.only_bool("scale_attn_by_inverse_layer_idx", false, false);
    keys.only_bool("add_cross_attention", false, false);
    let dropout = keys.number("resid_pdrop", 0.1);
    for other in ["embd_pdrop", "attn_pdrop"] {
        let found = keys.number(other, 0.1);
        if found != dropout {
            let why = format!(
                "{other}={found} differs from resid_pdrop={dropout}; only one dropout rate is supported"
            );
            keys.problems.push(why);
        }
    }
    Shape {
        family: Family::Gpt2,
        vocab: keys.size("vocab_size", None),
        dim,
        layers: keys.size("n_layer", None),
        heads,
        kv_heads: heads,
        head_dim: dim / heads.max(1),
        ffn: keys.size("n_inner", Some(4 * dim)),
        seq: keys.size("n_positions", None),
        tied: keys.bool("tie_word_embeddings", true),
        norm_eps: keys.number("layer_norm_epsilon", 1e-5),
        dropout,
        rope_theta: 10000.0,
        rope_scaling: None,
        moe: None,
        latent: None,
        lead: None,
    }
}

fn gpt2_json(shape: &Shape) -> Value {
    json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": shape.dim, "n_layer": shape.layers,
        "n_head": shape.heads, "n_inner": shape.ffn, "n_positions": shape.seq, "layer_norm_epsilon": shape.norm_eps,
        "activation_function": "gelu_new", "resid_pdrop": shape.dropout, "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
    })
}

fn llama(keys: &mut Keys, family: Family) -> Shape {
    let (dim, heads) = (keys.size("hidden_size", None), keys.size("num_attention_heads", None));
    let kv_heads = keys.size("num_key_value_heads", Some(heads));
    keys.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads);
    let seq = keys.size("max_position_embeddings", None);
    keys.only("hidden_act", &["silu"], "silu");
    for bias in ["attention_bias", "mlp_bias"] {
        keys.only_bool(bias, false, false);
    }
    for zero in ["attention_dropout", "router_jitter_noise"] {
        let found = keys.number(zero, 0.0);
        if found != 0.0 {
            keys.problems.push(format!("{zero}={found} is not supported; set it to 0"));
        }
    }
    if let Some(window) =
        keys.config["sliding_window"].as_u64().filter(|window| *window < seq as u64)
    {
        keys.problems.push(format!(
            "sliding_window={window} is smaller than the context of {seq}; sliding-window attention is not supported"
        ));
    }
    let is_moe = family == Family::Moe;
    for key in ["n_shared_experts", "num_shared_experts"] {
        if let Some(shared) = keys.config[key].as_u64().filter(|shared| *shared > 0) {
            keys.problems.push(format!("{key}={shared}: shared experts are not supported"));
        }
    }
    let (rope_theta, rope_scaling) = rope(keys, if is_moe { 1e6 } else { 1e4 });
    let moe = is_moe.then(|| Moe {
        experts: keys.size("num_local_experts", None),
        top_k: keys.size("num_experts_per_tok", None),
        capacity: None,
        aux_loss: keys.number("router_aux_loss_coef", 0.001),
        balance: Balance::default(),
        z_loss: 0.0,
        shared: 0,
    });
    Shape {
        family,
        vocab: keys.size("vocab_size", None),
        dim,
        layers: keys.size("num_hidden_layers", None),
        heads,
        kv_heads,
        head_dim: keys.size("head_dim", Some(dim / heads.max(1))),
        ffn: keys.size("intermediate_size", None),
        seq,
        tied: keys.bool("tie_word_embeddings", false),
        norm_eps: keys.number("rms_norm_eps", if is_moe { 1e-5 } else { 1e-6 }),
        dropout: 0.0,
        rope_theta,
        rope_scaling,
        moe,
        latent: None,
        lead: None,
    }
}

/// RoPE settings: `rope_parameters` in transformers 5, before that `rope_theta` and `rope_scaling`.
fn rope(keys: &mut Keys, default_theta: f64) -> (f64, Option<RopeScaling>) {
    let top_theta = keys.number("rope_theta", default_theta);
    let partial = keys.number("partial_rotary_factor", 1.0);
    let rope = match &keys.config["rope_parameters"] {
        Value::Null => &keys.config["rope_scaling"],
        parameters => parameters,
    };
    let number = |key: &str, default: f64| rope[key].as_f64().unwrap_or(default);
    if partial != 1.0 || number("partial_rotary_factor", 1.0) != 1.0 {
        keys.problems
            .push("partial_rotary_factor is not supported; whole heads are rotated".into());
    }
    let theta = number("rope_theta", top_theta);
    let kind = rope["rope_type"].as_str().or(rope["type"].as_str()).unwrap_or("default");
    let missing: Vec<_> = SCALING.into_iter().filter(|key| rope[*key].as_f64().is_none()).collect();
    match kind {
        "default" => (theta, None),
        "llama3" if missing.is_empty() => {
            let [factor, low_freq_factor, high_freq_factor, original] =
                SCALING.map(|key| number(key, 0.0));
            let original_seq = original as usize;
            (theta, Some(RopeScaling { factor, low_freq_factor, high_freq_factor, original_seq }))
        }
        "llama3" => {
            keys.problems.push(format!("rope_type llama3 without {}", missing.join(", ")));
            (theta, None)
        }
        other => {
            keys.problems
                .push(format!("rope_type {other} is not supported; use default or llama3"));
            (theta, None)
        }
    }
}

const SCALING: [&str; 4] =
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

fn llama_json(shape: &Shape) -> Value {
    let mut rope = json!({"rope_type": "default", "rope_theta": shape.rope_theta});
    let mut scaling = Value::Null;
    if let Some(s) = shape.rope_scaling {
        scaling = json!({
            "rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor, "original_max_position_embeddings": s.original_seq,
        });
        merge(&mut rope, scaling.clone());
    }
    let mut config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": shape.dim,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.seq, "rms_norm_eps": shape.norm_eps, "hidden_act": "silu",
        "attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
        // transformers 5 reads the first key, version 4 the other two.
        "rope_parameters": rope, "rope_theta": shape.rope_theta, "rope_scaling": scaling,
    });
    if let (Family::Moe, Some(moe)) = (shape.family, shape.moe) {
        let mixture = json!({
            "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.aux_loss,
            // Without it transformers omits the auxiliary loss.
            "output_router_logits": moe.aux_loss > 0.0, "sliding_window": null,
        });
        merge(&mut config, mixture);
    }
    config
}

fn merge(into: &mut Value, other: Value) {
    let (Value::Object(into), Value::Object(other)) = (into, other) else {
        unreachable!("both are objects")
    };
    into.extend(other);
}

/// Looks up keys and collects errors.
struct Keys<'a> {
    config: &'a Value,
    problems: Vec<String>,
}

impl Keys<'_> {
    /// A positive integer; required if there is no default.
    fn size(&mut self, key: &str, default: Option<usize>) -> usize {
        let value = &self.config[key];
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match (size.filter(|size| (1..=MAX_SIZE).contains(size)), default) {
            (Some(size), _) => size,
            (None, Some(default)) if value.is_null() => default,
            _ => {
                let found = if value.is_null() { "missing".into() } else { value.to_string() };
                let most = match size {
                    Some(size) if size > MAX_SIZE => format!(" of at most {MAX_SIZE}"),
                    _ => String::new(),
                };
                self.problems.push(format!("{key} must be a positive integer{most} (got {found})"));
                1
            }
        }
    }

    fn number(&mut self, key: &str, default: f64) -> f64 {
        match &self.config[key] {
            Value::Null => default,
            value => value.as_f64().unwrap_or_else(|| {
                self.problems.push(format!("{key} must be a number (got {value})"));
                default
            }),
        }
    }

    fn bool(&mut self, key: &str, default: bool) -> bool {
        match &self.config[key] {
            Value::Null => default,
            value => value.as_bool().unwrap_or_else(|| {
                self.problems.push(format!("{key} must be true or false (got {value})"));
                default
            }),
        }
    }

    fn only_bool(&mut self, key: &str, default: bool, known: bool) {
        if self.bool(key, default) != known {
            self.problems.push(format!("{key}={} is not supported; only {known} is", !known));
        }
    }

    fn only(&mut self, key: &str, known: &[&str], default: &str) {
        let found = self.config[key].as_str().unwrap_or(default);
        if !known.contains(&found) {
            self.problems
                .push(format!("{key}={found} is not supported; use {}", known.join(" or ")));
        }
    }

    fn divides(&mut self, small: &str, divisor: usize, large: &str, number: usize) {
        if !number.is_multiple_of(divisor) {
            self.problems.push(format!("{small}={divisor} does not divide {large}={number}"));
        }
    }
}
