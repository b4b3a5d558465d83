//! The parameters of a model, block by block, in the order in which they lie in a block's flat buffer.
//!
//! A matrix is (out, in), row by row. What one multiply can do at once lies side by side: q, k and v are
//! one (q + k + v, dim) matrix to the kernel and three tensors to a checkpoint, and so are gate and up.

use super::{Family, Moe, Shape};

/// A named tensor in a block's flat buffer.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Within the block: `attention.q.weight`.
    pub name: String,
    pub dims: Vec<usize>,
    pub init: Init,
    /// Whether weight decay acts on it: on matrices, not on gains and biases.
    pub decay: bool,
}

/// What a parameter is before the first step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal around zero with this standard deviation.
    Normal(f32),
}

/// The unit that is bucketed, gathered, recomputed and placed on a stage.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockParams {
    /// `embed`, `layers.0`, …, `head`.
    pub name: String,
    pub params: Vec<Param>,
}

impl Param {
    /// Elements.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl BlockParams {
    /// Elements of the flat buffer.
    pub fn len(&self) -> usize {
        self.params.iter().map(Param::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Each parameter with where it starts in the flat buffer.
    pub fn placed(&self) -> impl Iterator<Item = (usize, &Param)> {
        self.params.iter().scan(0, |end, param| {
            let start = *end;
            *end += param.len();
            Some((start, param))
        })
    }

    /// Where a parameter lies in the flat buffer.
    ///
    /// # Panics
    /// When the block has none of that name.
    pub fn range(&self, name: &str) -> std::ops::Range<usize> {
        let (start, param) = self
            .placed()
            .find(|(_, param)| param.name == name)
            .unwrap_or_else(|| panic!("block {} has no parameter {name}", self.name));
        start..start + param.len()
    }
}

/// GPT-2's standard deviation, taken by the other families too.
const STD: f32 = 0.02;

impl Shape {
    /// All blocks in the order of the forward pass.
    pub fn blocks(&self) -> Vec<BlockParams> {
        let layers = (0..self.layers).map(|layer| self.layer(layer));
        std::iter::once(self.embed()).chain(layers).chain([self.head()]).collect()
    }

    /// Parameters of the whole model.
    pub fn param_count(&self) -> usize {
        self.blocks().iter().map(BlockParams::len).sum()
    }

    /// The first block: token table, and positions where they are learned.
    pub fn embed(&self) -> BlockParams {
        let mut params = vec![matrix("tokens", self.vocab, self.dim, STD)];
        if self.family == Family::Gpt2 {
            params.push(matrix("positions", self.seq, self.dim, STD));
        }
        BlockParams { name: "embed".into(), params }
    }

    /// A layer, counted from 0.
    pub fn layer(&self, layer: usize) -> BlockParams {
        let mut params = self.norm("norm1");
        params.extend(self.attention());
        params.extend(self.norm("norm2"));
        match (self.family, self.moe) {
            (Family::Gpt2, _) => params.extend(self.gelu_mlp()),
            (Family::Llama, _) | (Family::Moe, None) => params.extend(self.swiglu("mlp")),
            (Family::Moe, Some(moe)) => params.extend(self.experts(moe)),
        }
        BlockParams { name: format!("layers.{layer}"), params }
    }

    /// The last block: norm, and the output projection unless it is tied.
    pub fn head(&self) -> BlockParams {
        let mut params = self.norm("norm");
        if !self.tied {
            params.push(matrix("output", self.vocab, self.dim, STD));
        }
        BlockParams { name: "head".into(), params }
    }

    /// Projections back into the residual stream start smaller, so that its variance does not grow with
    /// depth (GPT-2).
    fn residual_std(&self) -> f32 {
        STD / (2.0 * self.layers as f32).sqrt()
    }

    fn has_bias(&self) -> bool {
        self.family == Family::Gpt2
    }

    fn norm(&self, name: &str) -> Vec<Param> {
        let mut params = vec![vector(&format!("{name}.gain"), self.dim, Init::Ones)];
        if self.has_bias() {
            params.push(vector(&format!("{name}.bias"), self.dim, Init::Zeros));
        }
        params
    }

    fn attention(&self) -> Vec<Param> {
        let (q, kv) = (self.attention_dim(), self.kv_heads * self.head_dim);
        let mut params = vec![
            matrix("attention.q.weight", q, self.dim, STD),
            matrix("attention.k.weight", kv, self.dim, STD),
            matrix("attention.v.weight", kv, self.dim, STD),
        ];
        if self.has_bias() {
            params.push(vector("attention.q.bias", q, Init::Zeros));
            params.push(vector("attention.k.bias", kv, Init::Zeros));
            params.push(vector("attention.v.bias", kv, Init::Zeros));
        }
        params.push(matrix("attention.out.weight", self.dim, q, self.residual_std()));
        if self.has_bias() {
            params.push(vector("attention.out.bias", self.dim, Init::Zeros));
        }
        params
    }

    fn gelu_mlp(&self) -> Vec<Param> {
        vec![
            matrix("mlp.up.weight", self.ffn, self.dim, STD),
            vector("mlp.up.bias", self.ffn, Init::Zeros),
            matrix("mlp.down.weight", self.dim, self.ffn, self.residual_std()),
            vector("mlp.down.bias", self.dim, Init::Zeros),
        ]
    }

    fn swiglu(&self, prefix: &str) -> Vec<Param> {
        vec![
            matrix(&format!("{prefix}.gate.weight"), self.ffn, self.dim, STD),
            matrix(&format!("{prefix}.up.weight"), self.ffn, self.dim, STD),
            matrix(&format!("{prefix}.down.weight"), self.dim, self.ffn, self.residual_std()),
        ]
    }

    fn experts(&self, moe: Moe) -> Vec<Param> {
        let router = matrix("router.weight", moe.experts, self.dim, STD);
        let experts = (0..moe.experts).flat_map(|expert| self.swiglu(&format!("experts.{expert}")));
        std::iter::once(router).chain(experts).collect()
    }
}

fn matrix(name: &str, rows: usize, cols: usize, std: f32) -> Param {
    Param { name: name.into(), dims: vec![rows, cols], init: Init::Normal(std), decay: true }
}

fn vector(name: &str, len: usize, init: Init) -> Param {
    Param { name: name.into(), dims: vec![len], init, decay: false }
}
