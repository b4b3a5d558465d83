//! The parameters of a model, block by block, in the order in which they lie in a block's flat buffer.
//!
//! A matrix is (out, in), row by row. What one multiply can do at once lies side by side: q, k and v are
//! one (q + k + v, dim) matrix to the kernel and three tensors to a checkpoint, and so are gate and up.

use super::{Family, Latent, Moe, Shape};
use crate::cut;

/// A named tensor in a block's flat buffer.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Within the block: `attention.q.weight`.
    pub name: String,
    pub dims: Vec<usize>,
    pub init: Init,
    /// Whether weight decay acts on it: on matrices, not on gains and biases.
    pub decay: bool,
    /// How ranks of the tensor axis share it.
    pub split: Split,
    /// Of an expert: the ranks of the expert axis deal it out.
    pub expert: Option<usize>,
    /// The token table where the first and the last stage of a pipeline each have one.
    pub tied: bool,
    /// What it is a piece of.
    pub whole: Whole,
}

/// A tensor as a checkpoint knows it, and where a rank's piece of it lies.
#[derive(Clone, PartialEq, Debug)]
pub struct Whole {
    /// With its block: `layers.0.attention.q.weight`.
    pub name: String,
    pub dims: Vec<usize>,
    /// Number among all tensors of the model: its stream of random numbers.
    pub number: u64,
    /// The dimension along which the piece is cut, and where it starts there.
    pub dim: usize,
    pub start: usize,
}

/// How the ranks of the tensor axis share a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// Each has all of it and computes the same gradient.
    Copied,
    /// Each has all of it; under sequence parallelism each computes the gradient of its own tokens.
    Norm,
    /// Rows, dealt out evenly.
    Rows,
    /// Columns, dealt out evenly.
    Cols,
    /// Rows by heads of keys; where these are fewer than ranks, several ranks have the same.
    Keys,
    /// Rows, some ranks with one more than others.
    Vocab,
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
    /// Place among the model's blocks.
    pub number: usize,
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

    /// Whether all ranks of the tensor axis have the same gradient of it, and not pieces of one or parts of a sum.
    pub fn same_on_tensor(&self, sequence: bool) -> bool {
        match self.split {
            Split::Copied => true,
            Split::Norm => !sequence,
            Split::Rows | Split::Cols | Split::Keys | Split::Vocab => false,
        }
    }

    /// The piece of a rank: rows or columns `range` along dimension `dim` of what is here.
    fn piece(&self, dim: usize, range: std::ops::Range<usize>) -> Param {
        let mut dims = self.dims.clone();
        dims[dim] = range.len();
        Param {
            dims,
            whole: Whole { dim, start: range.start, ..self.whole.clone() },
            ..self.clone()
        }
    }

    /// What rank `index` of the `ranks` along the tensor axis holds.
    pub(super) fn on_tensor_rank(&self, index: usize, ranks: usize, kv_heads: usize) -> Param {
        let even = |dim: usize| self.piece(dim, cut(self.dims[dim], ranks, index));
        match self.split {
            Split::Copied | Split::Norm => self.clone(),
            Split::Rows | Split::Vocab => even(0),
            Split::Cols => even(1),
            Split::Keys => {
                let head = self.dims[0] / kv_heads;
                let heads = keys_of(kv_heads, ranks, index);
                self.piece(0, heads.start * head..heads.end * head)
            }
        }
    }

    /// The runs of consecutive elements that a piece is in its whole tensor: where each starts there, and
    /// where in the piece.
    pub fn runs(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
        let Whole { dim, start, dims: whole, .. } = &self.whole;
        let inner: usize = self.dims[*dim..].iter().product();
        let (stride, first) = match self.dims.get(dim + 1..) {
            Some(rest) => {
                let below: usize = rest.iter().product();
                (whole[*dim] * below, start * below)
            }
            None => (0, *start),
        };
        let count: usize = self.dims[..*dim].iter().product();
        (0..count).map(move |run| (run * stride + first, run * inner..(run + 1) * inner))
    }
}

/// The heads of keys that a rank of the tensor axis holds.
pub(super) fn keys_of(kv_heads: usize, ranks: usize, index: usize) -> std::ops::Range<usize> {
    if kv_heads >= ranks {
        return cut(kv_heads, ranks, index);
    }
    let head = index * kv_heads / ranks;
    head..head + 1
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
        let mut blocks: Vec<BlockParams> =
            std::iter::once(self.embed()).chain(layers).chain([self.head()]).collect();
        let mut count = 0;
        for (number, block) in blocks.iter_mut().enumerate() {
            block.number = number;
            for param in &mut block.params {
                param.whole.name = format!("{}.{}", block.name, param.name);
                param.whole.number = count;
                count += 1;
            }
        }
        blocks
    }

    /// Parameters of the whole model.
    pub fn param_count(&self) -> usize {
        self.blocks().iter().map(BlockParams::len).sum()
    }

    /// The first block: token table, and positions where they are learned.
    fn embed(&self) -> BlockParams {
        let mut params = vec![matrix("tokens", self.vocab, self.dim, STD, Split::Vocab)];
        if self.family == Family::Gpt2 {
            params.push(matrix("positions", self.seq, self.dim, STD, Split::Copied));
        }
        block("embed".into(), params)
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
        block(format!("layers.{layer}"), params)
    }

    /// The last block: norm, and the output projection unless it is tied.
    fn head(&self) -> BlockParams {
        let mut params = self.norm("norm");
        if !self.tied {
            params.push(matrix("output", self.vocab, self.dim, STD, Split::Vocab));
        }
        block("head".into(), params)
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
        let mut params = vec![vector(&format!("{name}.gain"), self.dim, Init::Ones, Split::Norm)];
        if self.has_bias() {
            params.push(vector(&format!("{name}.bias"), self.dim, Init::Zeros, Split::Norm));
        }
        params
    }

    /// Narrow projections are the same on all ranks of the tensor axis, wide ones are cut by heads.
    fn latent_attention(&self, latent: Latent) -> Vec<Param> {
        let (queries, heads) = (self.heads * self.head_dim, self.heads);
        let mut params = match latent.q_rank {
            Some(rank) => vec![
                matrix("attention.q_down.weight", rank, self.dim, STD, Split::Copied),
                vector("attention.q_norm.gain", rank, Init::Ones, Split::Norm),
                matrix("attention.q_up.weight", queries, rank, STD, Split::Rows),
            ],
            None => vec![matrix("attention.q.weight", queries, self.dim, STD, Split::Rows)],
        };
        let Latent { kv_rank, nope, rope, value, .. } = latent;
        let out = heads * value;
        params.extend([
            matrix("attention.kv_down.weight", kv_rank + rope, self.dim, STD, Split::Copied),
            vector("attention.kv_norm.gain", kv_rank, Init::Ones, Split::Norm),
            matrix("attention.kv_up.weight", heads * (nope + value), kv_rank, STD, Split::Rows),
            matrix("attention.out.weight", self.dim, out, self.residual_std(), Split::Cols),
        ]);
        params
    }

    fn attention(&self) -> Vec<Param> {
        let (q, kv) = (self.attention_dim(), self.kv_heads * self.head_dim);
        let mut params = vec![
            matrix("attention.q.weight", q, self.dim, STD, Split::Rows),
            matrix("attention.k.weight", kv, self.dim, STD, Split::Keys),
            matrix("attention.v.weight", kv, self.dim, STD, Split::Keys),
        ];
        if self.has_bias() {
            params.push(vector("attention.q.bias", q, Init::Zeros, Split::Rows));
            params.push(vector("attention.k.bias", kv, Init::Zeros, Split::Keys));
            params.push(vector("attention.v.bias", kv, Init::Zeros, Split::Keys));
        }
        params.push(matrix("attention.out.weight", self.dim, q, self.residual_std(), Split::Cols));
        if self.has_bias() {
            params.push(vector("attention.out.bias", self.dim, Init::Zeros, Split::Copied));
        }
        params
    }

    fn gelu_mlp(&self) -> Vec<Param> {
        vec![
            matrix("mlp.up.weight", self.ffn, self.dim, STD, Split::Rows),
            vector("mlp.up.bias", self.ffn, Init::Zeros, Split::Rows),
            matrix("mlp.down.weight", self.dim, self.ffn, self.residual_std(), Split::Cols),
            vector("mlp.down.bias", self.dim, Init::Zeros, Split::Copied),
        ]
    }

    fn swiglu(&self, prefix: &str, width: usize) -> Vec<Param> {
        let name = |part: &str| format!("{prefix}.{part}.weight");
        vec![
            matrix(&name("gate"), width, self.dim, STD, Split::Rows),
            matrix(&name("up"), width, self.dim, STD, Split::Rows),
            matrix(&name("down"), self.dim, width, self.residual_std(), Split::Cols),
        ]
    }

    /// What all replicas have alike comes before what they deal out.
    fn experts(&self, moe: Moe) -> Vec<Param> {
        let mut params = vec![matrix("router.weight", moe.experts, self.dim, STD, Split::Copied)];
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

fn block(name: String, params: Vec<Param>) -> BlockParams {
    BlockParams { name, number: 0, params }
}

fn matrix(name: &str, rows: usize, cols: usize, std: f32, split: Split) -> Param {
    param(name, vec![rows, cols], Init::Normal(std), split)
}

fn vector(name: &str, len: usize, init: Init, split: Split) -> Param {
    param(name, vec![len], init, split)
}

fn param(name: &str, dims: Vec<usize>, init: Init, split: Split) -> Param {
    // Name and number are given when all blocks are there.
    let whole = Whole { name: String::new(), dims: dims.clone(), number: 0, dim: 0, start: 0 };
    Param {
        name: name.into(),
        decay: dims.len() > 1,
        dims,
        init,
        split,
        expert: None,
        tied: false,
        whole,
    }
}
