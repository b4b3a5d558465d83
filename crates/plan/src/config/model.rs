//! `[model]`: a preset, explicit sizes, or a preset with some sizes overridden.

use super::Reader;
use crate::model::{Balance, Family, Shape};

/// `[model]` as typed, or a preset.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Model {
    pub preset: Option<String>,
    pub family: Option<Family>,
    pub dim: Option<usize>,
    pub layers: Option<usize>,
    pub heads: Option<usize>,
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub ffn: Option<usize>,
    pub vocab: Option<usize>,
    pub seq: Option<usize>,
    pub tied: Option<bool>,
    pub norm_eps: Option<f64>,
    pub dropout: Option<f64>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: RopeScaling,
    pub experts: Option<usize>,
    pub top_k: Option<usize>,
    pub capacity: Option<f64>,
    pub aux_loss: Option<f64>,
    pub balance: Option<Balance>,
    pub z_loss: Option<f64>,
    pub shared_experts: Option<usize>,
    // Multi-head latent attention (DeepSeek), used if `kv_lora_rank` is set, and leading dense layers.
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: Option<usize>,
    pub nope_head_dim: Option<usize>,
    pub rope_head_dim: Option<usize>,
    pub v_head_dim: Option<usize>,
    pub dense_layers: Option<usize>,
    pub dense_ffn: Option<usize>,
}

/// `[model.rope_scaling]`: Llama 3.1's RoPE scaling, used if `factor` is set.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RopeScaling {
    pub factor: Option<f64>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub original_seq: Option<usize>,
}

const BALANCES: [(&str, Balance); 2] = [("sequence", Balance::Sequence), ("batch", Balance::Batch)];

impl Model {
    /// Reads a section of any name; presets are such sections too.
    pub(crate) fn read(reader: &mut Reader, section: &str) -> Model {
        let key = |name: &str| format!("{section}.{name}");
        Model {
            preset: reader.text(&key("preset")),
            family: reader.word(&key("family"), &Family::NAMES),
            dim: reader.count(&key("dim")),
            layers: reader.count(&key("layers")),
            heads: reader.count(&key("heads")),
            kv_heads: reader.count(&key("kv_heads")),
            head_dim: reader.count(&key("head_dim")),
            ffn: reader.count(&key("ffn")),
            vocab: reader.count(&key("vocab")),
            seq: reader.count(&key("seq")),
            tied: reader.flag(&key("tied")),
            norm_eps: reader.number(&key("norm_eps")),
            dropout: reader.number(&key("dropout")),
            rope_theta: reader.number(&key("rope_theta")),
            rope_scaling: RopeScaling {
                factor: reader.number(&key("rope_scaling.factor")),
                low_freq_factor: reader.number(&key("rope_scaling.low_freq_factor")),
                high_freq_factor: reader.number(&key("rope_scaling.high_freq_factor")),
                original_seq: reader.count(&key("rope_scaling.original_seq")),
            },
            experts: reader.count(&key("experts")),
            top_k: reader.count(&key("top_k")),
            capacity: reader.number(&key("capacity")),
            aux_loss: reader.number(&key("aux_loss")),
            balance: reader.word(&key("balance"), &BALANCES),
            z_loss: reader.number(&key("z_loss")),
            shared_experts: reader.count(&key("shared_experts")),
            q_lora_rank: reader.count(&key("q_lora_rank")),
            kv_lora_rank: reader.count(&key("kv_lora_rank")),
            nope_head_dim: reader.count(&key("nope_head_dim")),
            rope_head_dim: reader.count(&key("rope_head_dim")),
            v_head_dim: reader.count(&key("v_head_dim")),
            dense_layers: reader.count(&key("dense_layers")),
            dense_ffn: reader.count(&key("dense_ffn")),
        }
    }

    /// The section that describes a shape; every key is set.
    pub fn of(shape: &Shape) -> Model {
        let (moe, latent, lead) = (shape.moe, shape.latent, shape.lead);
        let scaling = shape.rope_scaling;
        Model {
            preset: None,
            family: Some(shape.family),
            dim: Some(shape.dim),
            layers: Some(shape.layers),
            heads: Some(shape.heads),
            kv_heads: Some(shape.kv_heads),
            head_dim: Some(shape.head_dim),
            ffn: Some(shape.ffn),
            vocab: Some(shape.vocab),
            seq: Some(shape.seq),
            tied: Some(shape.tied),
            norm_eps: Some(shape.norm_eps),
            dropout: Some(shape.dropout),
            rope_theta: Some(shape.rope_theta),
            rope_scaling: RopeScaling {
                factor: scaling.map(|scaling| scaling.factor),
                low_freq_factor: scaling.map(|scaling| scaling.low_freq_factor),
                high_freq_factor: scaling.map(|scaling| scaling.high_freq_factor),
                original_seq: scaling.map(|scaling| scaling.original_seq),
            },
            experts: moe.map(|moe| moe.experts),
            top_k: moe.map(|moe| moe.top_k),
            capacity: moe.and_then(|moe| moe.capacity),
            aux_loss: moe.map(|moe| moe.aux_loss),
            balance: moe.map(|moe| moe.balance),
            z_loss: moe.map(|moe| moe.z_loss),
            shared_experts: moe.map(|moe| moe.shared),
            q_lora_rank: latent.and_then(|latent| latent.q_rank),
            kv_lora_rank: latent.map(|latent| latent.kv_rank),
            nope_head_dim: latent.map(|latent| latent.nope),
            rope_head_dim: latent.map(|latent| latent.rope),
            v_head_dim: latent.map(|latent| latent.value),
            dense_layers: lead.map(|lead| lead.layers),
            dense_ffn: lead.map(|lead| lead.ffn),
        }
    }

    /// The loss terms and the capacity of the router alone.
    pub(crate) fn router(&self) -> Model {
        Model {
            capacity: self.capacity,
            aux_loss: self.aux_loss,
            balance: self.balance,
            z_loss: self.z_loss,
            ..Model::default()
        }
    }

    /// Overrides `base` with the keys that are set here.
    pub(crate) fn over(&self, base: &Model) -> Model {
        let (rope, under) = (self.rope_scaling, base.rope_scaling);
        Model {
            preset: self.preset.clone().or(base.preset.clone()),
            family: self.family.or(base.family),
            dim: self.dim.or(base.dim),
            layers: self.layers.or(base.layers),
            heads: self.heads.or(base.heads),
            kv_heads: self.kv_heads.or(base.kv_heads),
            head_dim: self.head_dim.or(base.head_dim),
            ffn: self.ffn.or(base.ffn),
            vocab: self.vocab.or(base.vocab),
            seq: self.seq.or(base.seq),
            tied: self.tied.or(base.tied),
            norm_eps: self.norm_eps.or(base.norm_eps),
            dropout: self.dropout.or(base.dropout),
            rope_theta: self.rope_theta.or(base.rope_theta),
            rope_scaling: RopeScaling {
                factor: rope.factor.or(under.factor),
                low_freq_factor: rope.low_freq_factor.or(under.low_freq_factor),
                high_freq_factor: rope.high_freq_factor.or(under.high_freq_factor),
                original_seq: rope.original_seq.or(under.original_seq),
            },
            experts: self.experts.or(base.experts),
            top_k: self.top_k.or(base.top_k),
            capacity: self.capacity.or(base.capacity),
            aux_loss: self.aux_loss.or(base.aux_loss),
            balance: self.balance.or(base.balance),
            z_loss: self.z_loss.or(base.z_loss),
            shared_experts: self.shared_experts.or(base.shared_experts),
            q_lora_rank: self.q_lora_rank.or(base.q_lora_rank),
            kv_lora_rank: self.kv_lora_rank.or(base.kv_lora_rank),
            nope_head_dim: self.nope_head_dim.or(base.nope_head_dim),
            rope_head_dim: self.rope_head_dim.or(base.rope_head_dim),
            v_head_dim: self.v_head_dim.or(base.v_head_dim),
            dense_layers: self.dense_layers.or(base.dense_layers),
            dense_ffn: self.dense_ffn.or(base.dense_ffn),
        }
    }
}
