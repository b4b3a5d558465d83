//! Parameter lists of the built-in families, block by block.

use super::params::number_tensors;
use super::{BlockParams, Family, Init, Latent, Moe, Param, Shape, Split, Tied};

/// GPT-2's standard deviation of initial weights, used by all families.
const STD: f32 = 0.02;

impl Shape {
    /// The parameters of every block, in the order of the forward pass: the embedding, the layers, the head.
    pub fn blocks(&self) -> Vec<BlockParams> {
        let layers = (0..self.layers).map(|layer| self.layer(layer));
        let mut blocks: Vec<BlockParams> =
            std::iter::once(self.embed()).chain(layers).chain([self.head()]).collect();
        number_tensors(&mut blocks);
        blocks
    }

    /// Parameters of the whole model.
    pub fn param_count(&self) -> usize {
        self.blocks().iter().map(BlockParams::len).sum()
    }

    /// The first block: the token table, and positions where they are learned.
    fn embed(&self) -> BlockParams {
        let mut params = vec![Param::matrix("tokens", [self.vocab, self.dim], STD, Split::Vocab)];
        if self.family == Family::Gpt2 {
            params.push(Param::matrix("positions", [self.seq, self.dim], STD, Split::Replicated));
        }
        BlockParams::new("embed", params)
    }

    /// A layer, counted from 0.
    fn layer(&self, layer: usize) -> BlockParams {
        let mut params = self.norm("norm1");
        params.extend(match self.latent {
            Some(latent) => self.latent_attention(latent),
            None => self.attention(),
        });
        params.extend(self.norm("norm2"));
        let lead = self.lead.filter(|lead| layer < lead.layers);
        match (self.family, self.moe) {
            (Family::Moe, Some(_)) if lead.is_some() => {
                params.extend(lead.into_iter().flat_map(|lead| self.swiglu("mlp", lead.ffn)))
            }
            (Family::Gpt2, _) => params.extend(self.gelu_mlp()),
            (Family::Llama, _) | (Family::Moe, None) => params.extend(self.swiglu("mlp", self.ffn)),
            (Family::Moe, Some(moe)) => params.extend(self.experts(moe)),
        }
        BlockParams::new(format!("layers.{layer}"), params)
    }

    /// The last block: a norm, and the output projection unless it is tied.
    fn head(&self) -> BlockParams {
        let mut params = self.norm("norm");
        if !self.tied {
            params.push(Param::matrix("output", [self.vocab, self.dim], STD, Split::Vocab));
        }
        let tied = self.tied.then(|| Tied {
            name: "output".into(),
            block: "embed".into(),
            param: "tokens".into(),
        });
        BlockParams { tied, ..BlockParams::new("head", params) }
    }

    /// Projections back into the residual stream start smaller, so that its variance does not grow with depth
    /// (GPT-2).
    fn residual_std(&self) -> f32 {
        STD / (2.0 * self.layers as f32).sqrt()
    }

    fn has_bias(&self) -> bool {
        self.family == Family::Gpt2
    }

    fn norm(&self, name: &str) -> Vec<Param> {
        let param =
            |part, init| Param::vector(&format!("{name}.{part}"), self.dim, init, Split::Norm);
        let mut params = vec![param("gain", Init::Ones)];
        if self.has_bias() {
            params.push(param("bias", Init::Zeros));
        }
        params
    }

    /// The low-rank projections are replicated on all ranks of the tensor axis; the others are split by heads.
    fn latent_attention(&self, latent: Latent) -> Vec<Param> {
        let (queries, heads, dim) = (self.heads * self.head_dim, self.heads, self.dim);
        let mut params = match latent.q_rank {
            Some(rank) => vec![
                Param::matrix("attention.q_down.weight", [rank, dim], STD, Split::Replicated),
                Param::vector("attention.q_norm.gain", rank, Init::Ones, Split::Norm),
                Param::matrix("attention.q_up.weight", [queries, rank], STD, Split::Rows),
            ],
            None => vec![Param::matrix("attention.q.weight", [queries, dim], STD, Split::Rows)],
        };
        let Latent { kv_rank, nope, rope, value, .. } = latent;
        let (down, up) = ([kv_rank + rope, dim], [heads * (nope + value), kv_rank]);
        let (out, std) = ([dim, heads * value], self.residual_std());
        params.extend([
            Param::matrix("attention.kv_down.weight", down, STD, Split::Replicated),
            Param::vector("attention.kv_norm.gain", kv_rank, Init::Ones, Split::Norm),
            Param::matrix("attention.kv_up.weight", up, STD, Split::Rows),
            Param::matrix("attention.out.weight", out, std, Split::Cols),
        ]);
        params
    }

    fn attention(&self) -> Vec<Param> {
        let (q, kv, dim) = (self.attention_dim(), self.kv_heads * self.head_dim, self.dim);
        let mut params = vec![
            Param::matrix("attention.q.weight", [q, dim], STD, Split::Rows),
            Param::matrix("attention.k.weight", [kv, dim], STD, Split::Keys),
            Param::matrix("attention.v.weight", [kv, dim], STD, Split::Keys),
        ];
        if self.has_bias() {
            params.push(Param::vector("attention.q.bias", q, Init::Zeros, Split::Rows));
            params.push(Param::vector("attention.k.bias", kv, Init::Zeros, Split::Keys));
            params.push(Param::vector("attention.v.bias", kv, Init::Zeros, Split::Keys));
        }
        let std = self.residual_std();
        params.push(Param::matrix("attention.out.weight", [dim, q], std, Split::Cols));
        if self.has_bias() {
            params.push(Param::vector("attention.out.bias", dim, Init::Zeros, Split::Replicated));
        }
        params
    }

    fn gelu_mlp(&self) -> Vec<Param> {
        let (ffn, dim, std) = (self.ffn, self.dim, self.residual_std());
        vec![
            Param::matrix("mlp.up.weight", [ffn, dim], STD, Split::Rows),
            Param::vector("mlp.up.bias", ffn, Init::Zeros, Split::Rows),
            Param::matrix("mlp.down.weight", [dim, ffn], std, Split::Cols),
            Param::vector("mlp.down.bias", dim, Init::Zeros, Split::Replicated),
        ]
    }

    fn swiglu(&self, prefix: &str, width: usize) -> Vec<Param> {
        let name = |part: &str| format!("{prefix}.{part}.weight");
        let (dim, std) = (self.dim, self.residual_std());
        vec![
            Param::matrix(&name("gate"), [width, dim], STD, Split::Rows),
            Param::matrix(&name("up"), [width, dim], STD, Split::Rows),
            Param::matrix(&name("down"), [dim, width], std, Split::Cols),
        ]
    }

    /// Parameters that all replicas have come before those of experts.
    fn experts(&self, moe: Moe) -> Vec<Param> {
        let router = [moe.experts, self.dim];
        let mut params = vec![Param::matrix("router.weight", router, STD, Split::Replicated)];
        if moe.shared > 0 {
            params.extend(self.swiglu("shared", moe.shared * self.ffn));
        }
        for expert in 0..moe.experts {
            let of_expert = self.swiglu(&format!("experts.{expert}"), self.ffn).into_iter();
            params.extend(of_expert.map(|param| Param { expert: Some(expert), ..param }));
        }
        params
    }
}
