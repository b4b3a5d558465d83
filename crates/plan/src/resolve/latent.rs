//! Resolves the keys of DeepSeek models: multi-head latent attention and leading dense layers.

use super::checker::Checker;
use crate::config::Model;
use crate::model::{Family, Latent, Lead};

/// Latent attention, used if `kv_lora_rank` is set. Defaults are those of DeepSeek-V2 and V3.
pub(super) fn latent(checker: &mut Checker, model: &Model) -> Option<Latent> {
    let kv_rank = model.kv_lora_rank.filter(|rank| *rank > 0);
    let Some(kv_rank) = kv_rank else {
        let rest = [
            ("q_lora_rank", model.q_lora_rank),
            ("nope_head_dim", model.nope_head_dim),
            ("rope_head_dim", model.rope_head_dim),
            ("v_head_dim", model.v_head_dim),
        ];
        for (name, _) in rest.into_iter().filter(|(_, value)| value.is_some_and(|size| size > 0)) {
            let message =
                format!("{name} is only used with latent attention, but kv_lora_rank is not set");
            let key = format!("model.{name}");
            let suggestion = format!("set model.kv_lora_rank or remove {name}");
            checker.add(&[&key, "model.kv_lora_rank"], message, suggestion);
        }
        return None;
    };
    let latent = Latent {
        q_rank: model.q_lora_rank.filter(|rank| *rank > 0),
        kv_rank,
        nope: model.nope_head_dim.unwrap_or(128),
        rope: model.rope_head_dim.unwrap_or(64),
        value: model.v_head_dim.unwrap_or(128),
    };
    if let (Some(keys), Some(heads)) = (model.kv_heads, model.heads)
        && keys != heads
    {
        let message = format!(
            "kv_heads={keys} differs from heads={heads}, but latent attention has a key for every head"
        );
        checker.add(&["model.kv_heads", "model.kv_lora_rank"], message, "remove kv_heads");
    }
    let width = latent.nope.saturating_add(latent.rope);
    if let Some(typed) = model.head_dim.filter(|typed| *typed != width) {
        let message = format!("head_dim={typed}, but nope_head_dim + rope_head_dim = {width}");
        checker.add(&["model.head_dim", "model.nope_head_dim"], message, "remove head_dim");
    }
    Some(latent)
}

/// The leading dense layers of a mixture of experts.
pub(super) fn lead(checker: &mut Checker, model: &Model, layers: usize) -> Option<Lead> {
    let lead = Lead {
        layers: model.dense_layers.filter(|layers| *layers > 0)?,
        ffn: model.dense_ffn.unwrap_or(0),
    };
    if lead.layers > layers {
        let message = format!("dense_layers={} is more than layers={layers}", lead.layers);
        let suggestion = format!("use at most {layers}");
        checker.add(&["model.dense_layers", "model.layers"], message, suggestion);
        return None;
    }
    Some(lead)
}

/// Reports keys that the family does not support.
pub(super) fn check_family(checker: &mut Checker, typed: &Model, family: Family) {
    let experts = [("dense_layers", typed.dense_layers), ("dense_ffn", typed.dense_ffn)];
    let rotary = [("kv_lora_rank", typed.kv_lora_rank), ("q_lora_rank", typed.q_lora_rank)];
    let typed = |(_, value): &(&str, Option<usize>)| value.is_some();
    if family != Family::Moe {
        for (name, _) in experts.into_iter().filter(typed) {
            let message = format!("{name} is only used with family = \"moe\"");
            let key = format!("model.{name}");
            checker.add(&[&key, "model.family"], message, "set family = \"moe\" or remove it");
        }
    }
    if family == Family::Gpt2 {
        for (name, _) in rotary.into_iter().filter(typed) {
            let message =
                format!("{name} requires rotary positions, but gpt2 has learned positions");
            let key = format!("model.{name}");
            checker.add(&[&key, "model.family"], message, "set family = \"moe\" or \"llama\"");
        }
    }
}
