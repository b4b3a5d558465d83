//! Maps our parameters to parts of Hugging Face tensors.

use crate::tensors::Named;
use lockstep_plan::model::{Family, Shape};

/// A part of a Hugging Face tensor. The tensor is viewed as a matrix whose columns are its last dim, transposed if
/// `transposed`; the part starts at `row` and has as many rows as our parameter.
#[derive(Clone, PartialEq, Debug)]
pub struct Place {
    /// Name in transformers, including the prefix.
    pub name: String,
    /// Dims of the whole Hugging Face tensor.
    pub dims: Vec<usize>,
    /// Stored as (in, out), like GPT-2's Conv1D.
    pub transposed: bool,
    pub row: usize,
}

/// Prefix of the names in a folder with an output projection; a folder of the bare model has no prefix.
pub fn prefix(family: Family) -> &'static str {
    match family {
        Family::Gpt2 => "transformer.",
        Family::Llama | Family::Moe => "model.",
    }
}

/// Possible locations of a parameter. `save_pretrained` and our export use the first; the others are accepted.
pub fn places(shape: &Shape, param: &Named) -> Vec<Place> {
    match shape.family {
        Family::Gpt2 => vec![gpt2(shape, param)],
        Family::Llama | Family::Moe => llama(shape, param),
    }
}

/// Tensors that are not parameters: masks and frequencies stored by older versions, and the output projection of a
/// model with tied embeddings.
pub fn is_buffer(shape: &Shape, name: &str) -> bool {
    let mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    match name {
        "lm_head.weight" => shape.tied,
        _ if shape.family == Family::Gpt2 => mask,
        _ => name.ends_with(".rotary_emb.inv_freq"),
    }
}

fn gpt2(shape: &Shape, param: &Named) -> Place {
    let (layer, rest) = split(&param.name);
    let plain = |name: &str| whole(name.into(), param);
    let in_layer = |name: &str| whole(format!("transformer.h.{layer}.{name}"), param);
    // Conv1D weights are (in, out).
    let transposed = |name: &str, out: usize, row: usize| Place {
        dims: vec![param.dims[1], out],
        transposed: true,
        row,
        ..in_layer(name)
    };
    let part = |name: &str, row: usize| Place { dims: vec![3 * shape.dim], row, ..in_layer(name) };
    let (dim, c_attn) = (shape.dim, "attn.c_attn.weight");
    match rest {
        "embed.tokens" => plain("transformer.wte.weight"),
        "embed.positions" => plain("transformer.wpe.weight"),
        "head.norm.gain" => plain("transformer.ln_f.weight"),
        "head.norm.bias" => plain("transformer.ln_f.bias"),
        "head.output" => plain("lm_head.weight"),
        "norm1.gain" => in_layer("ln_1.weight"),
        "norm1.bias" => in_layer("ln_1.bias"),
        "norm2.gain" => in_layer("ln_2.weight"),
        "norm2.bias" => in_layer("ln_2.bias"),
        "attention.q.weight" => transposed(c_attn, 3 * dim, 0),
        "attention.k.weight" => transposed(c_attn, 3 * dim, dim),
        "attention.v.weight" => transposed(c_attn, 3 * dim, 2 * dim),
        "attention.q.bias" => part("attn.c_attn.bias", 0),
        "attention.k.bias" => part("attn.c_attn.bias", dim),
        "attention.v.bias" => part("attn.c_attn.bias", 2 * dim),
        "attention.out.weight" => transposed("attn.c_proj.weight", dim, 0),
        "attention.out.bias" => in_layer("attn.c_proj.bias"),
        "mlp.up.weight" => transposed("mlp.c_fc.weight", shape.ffn, 0),
        "mlp.up.bias" => in_layer("mlp.c_fc.bias"),
        "mlp.down.weight" => transposed("mlp.c_proj.weight", dim, 0),
        "mlp.down.bias" => in_layer("mlp.c_proj.bias"),
        other => unreachable!("GPT-2 has no parameter {other}"),
    }
}

fn llama(shape: &Shape, param: &Named) -> Vec<Place> {
    let (layer, rest) = split(&param.name);
    if let Some(expert) = rest.strip_prefix("experts.") {
        return experts(shape, param, layer, expert);
    }
    let in_layer = |name: &str| format!("model.layers.{layer}.{name}");
    let names = match rest {
        "embed.tokens" => vec!["model.embed_tokens.weight".into()],
        "head.norm.gain" => vec!["model.norm.weight".into()],
        "head.output" => vec!["lm_head.weight".into()],
        "norm1.gain" => vec![in_layer("input_layernorm.weight")],
        "norm2.gain" => vec![in_layer("post_attention_layernorm.weight")],
        "attention.q.weight" => vec![in_layer("self_attn.q_proj.weight")],
        "attention.k.weight" => vec![in_layer("self_attn.k_proj.weight")],
        "attention.v.weight" => vec![in_layer("self_attn.v_proj.weight")],
        "attention.out.weight" => vec![in_layer("self_attn.o_proj.weight")],
        "mlp.gate.weight" => vec![in_layer("mlp.gate_proj.weight")],
        "mlp.up.weight" => vec![in_layer("mlp.up_proj.weight")],
        "mlp.down.weight" => vec![in_layer("mlp.down_proj.weight")],
        "router.weight" => {
            vec![in_layer("block_sparse_moe.gate.weight"), in_layer("mlp.gate.weight")]
        }
        other => unreachable!("Llama and Mixtral have no parameter {other}"),
    };
    names.into_iter().map(|name| whole(name, param)).collect()
}

/// A matrix of an expert. transformers 5 stores all experts of a layer in two tensors, gate and up (experts, 2 ffn, dim)
/// and down (experts, dim, ffn); it saves them separately, but other programs may not.
fn experts(shape: &Shape, param: &Named, layer: &str, rest: &str) -> Vec<Place> {
    let (expert, matrix) = rest.split_once('.').expect("experts.N.MATRIX.weight");
    let number: usize = expert.parse().expect("experts are numbered");
    let count = shape.moe.expect("only a mixture has experts").experts;
    let (dim, ffn) = (shape.dim, shape.ffn);
    let gate_up = |row| ("gate_up_proj", vec![count, 2 * ffn, dim], 2 * ffn * number + row);
    let (short, (fused, dims, row)) = match matrix {
        "gate.weight" => ("w1", gate_up(0)),
        "up.weight" => ("w3", gate_up(ffn)),
        "down.weight" => ("w2", ("down_proj", vec![count, dim, ffn], dim * number)),
        other => unreachable!("an expert has no {other}"),
    };
    let apart = format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{short}.weight");
    let fused = format!("model.layers.{layer}.mlp.experts.{fused}");
    vec![whole(apart, param), Place { name: fused, dims, transposed: false, row }]
}

fn whole(name: String, param: &Named) -> Place {
    Place { name, dims: param.dims.clone(), transposed: false, row: 0 }
}

/// `layers.3.norm1.gain` → ("3", "norm1.gain"); other names are returned unchanged.
fn split(name: &str) -> (&str, &str) {
    name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).unwrap_or(("", name))
}
