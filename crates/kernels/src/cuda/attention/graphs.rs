//! Attention as cuDNN operation graphs, in the form in which cuDNN recognizes it and fuses it into one kernel.

use lockstep_cuda::Result;

use crate::AttentionShape;
use crate::cuda::dnn::{DataType, Graph, Pointwise, Reduction, Tensor};

/// Ids of the tensors in device memory.
pub(super) const Q: i64 = 1;
pub(super) const K: i64 = 2;
pub(super) const V: i64 = 3;
pub(super) const OUT: i64 = 4;
pub(super) const LSE: i64 = 5;
pub(super) const DOUT: i64 = 6;
pub(super) const DQ: i64 = 7;
pub(super) const DK: i64 = 8;
pub(super) const DV: i64 = 9;
/// Σ dout · out of each query, written by the graph. (batch * heads, q_len), f32
pub(super) const DELTA: i64 = 10;
/// Sums of the gradient of queries in f32; only without determinism. (batch, heads, q_len, head_dim)
pub(super) const DQ_SUMS: i64 = 11;

/// All that a graph depends on, so that plans can be kept by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Problem {
    pub batch: i64,
    pub heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
    pub q_len: i64,
    pub k_len: i64,
    /// Query i attends to keys 0..=i; otherwise to all keys.
    pub causal: bool,
    /// Bits of the scale, an f32.
    pub scale: u32,
    /// Elements between the tokens of q, k and v.
    pub strides: [i64; 3],
    /// Elements between the tokens of the output.
    pub out_stride: i64,
    pub pass: Pass,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    Forward,
    Backward {
        /// Elements between the tokens of dq, dk and dv.
        strides: [i64; 3],
        deterministic: bool,
    },
}

impl Problem {
    pub fn new(shape: &AttentionShape, causal: bool, strides: [i64; 3], pass: Pass) -> Problem {
        let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, scale, .. } = *shape;
        let [batch, heads, kv_heads, head_dim, q_len, k_len] =
            [batch, heads, kv_heads, head_dim, q_len, k_len].map(|size| size as i64);
        let (scale, out_stride) = (scale.to_bits(), heads * head_dim);
        Problem {
            batch,
            heads,
            kv_heads,
            head_dim,
            q_len,
            k_len,
            causal,
            scale,
            strides,
            out_stride,
            pass,
        }
    }

    /// Whether results must have the same bits in every run.
    pub fn deterministic(&self) -> bool {
        match self.pass {
            Pass::Forward => true,
            Pass::Backward { deterministic, .. } => deterministic,
        }
    }

    /// Adds the operations to an empty graph.
    pub fn write(&self, graph: &mut Graph) -> Result<()> {
        match self.pass {
            Pass::Forward => self.forward(graph),
            Pass::Backward { strides, deterministic } => {
                self.backward(graph, strides, deterministic)
            }
        }
    }

    /// out = softmax(mask(scale q kᵀ)) v, and the log-sum-exp.
    fn forward(&self, graph: &mut Graph) -> Result<()> {
        let [q, k, v] = self.strides;
        let q = self.queries(Q, q).declare(graph)?;
        let k = self.keys(K, k).transposed().declare(graph)?;
        let v = self.keys(V, v).declare(graph)?;
        let out = self.queries(OUT, self.out_stride).declare(graph)?;
        let lse = graph.tensor(LSE, DataType::F32, self.row_dims(), self.row_strides())?;

        let scores = self.scores(graph, q, k)?;
        let scores = self.masked(graph, scores)?;
        let max = graph.intermediate(DataType::F32, self.row_dims(), self.row_strides())?;
        graph.reduce(Reduction::Max, scores, max)?;
        let shifted = graph.pointwise(Pointwise::Sub, scores, Some(max))?;
        let exponentials = graph.pointwise(Pointwise::Exp, shifted, None)?;
        let sum = graph.intermediate(DataType::F32, self.row_dims(), self.row_strides())?;
        graph.reduce(Reduction::Sum, exponentials, sum)?;
        let log = graph.pointwise(Pointwise::Log, sum, None)?;
        graph.pointwise_to(Pointwise::Add, max, Some(log), lse)?;
        let probs = graph.intermediate(DataType::Bf16, self.score_dims(), self.score_strides())?;
        graph.pointwise_to(Pointwise::Div, exponentials, Some(sum), probs)?;
        graph.matmul(probs, v, out)
    }

    fn backward(&self, graph: &mut Graph, strides: [i64; 3], deterministic: bool) -> Result<()> {
        let [q, k, v] = self.strides;
        let q = self.queries(Q, q).declare(graph)?;
        let k = self.keys(K, k).transposed().declare(graph)?;
        let v = self.keys(V, v).transposed().declare(graph)?;
        let out = self.queries(OUT, self.out_stride).declare(graph)?;
        let dout = self.queries(DOUT, self.out_stride).declare(graph)?;
        let lse = graph.tensor(LSE, DataType::F32, self.row_dims(), self.row_strides())?;
        let dq = self.queries(DQ, strides[0]).declare(graph)?;
        let dk = self.keys(DK, strides[1]).declare(graph)?;
        let dv = self.keys(DV, strides[2]).declare(graph)?;

        // delta = Σ dout · out. The multiplication by one stands where the scale of dropout would be.
        let products = graph.intermediate(DataType::F32, out.dims, contiguous(out.dims))?;
        graph.pointwise_to(Pointwise::Mul, dout, Some(out), products)?;
        let sums = graph.intermediate(DataType::F32, self.row_dims(), self.row_strides())?;
        graph.reduce(Reduction::Sum, products, sums)?;
        let delta = graph.tensor(DELTA, DataType::F32, self.row_dims(), self.row_strides())?;
        let one = graph.scalar(1.0)?;
        graph.pointwise_to(Pointwise::Mul, sums, Some(one), delta)?;

        // p = exp(mask(scale q kᵀ - lse)); dv = pᵀ dout
        let scores = self.scores(graph, q, k)?;
        let shifted = graph.pointwise(Pointwise::Sub, scores, Some(lse))?;
        let shifted = self.masked(graph, shifted)?;
        let probs = graph.pointwise(Pointwise::Exp, shifted, None)?;
        let transposed = self.transposed_scores(graph, probs)?;
        self.key_gradient(graph, (transposed, dout), dv)?;

        // ds = scale p (dout vᵀ - delta); dk = dsᵀ q; dq = ds k
        let dprobs = graph.intermediate(DataType::F32, self.score_dims(), self.score_strides())?;
        graph.matmul(dout, v, dprobs)?;
        let centered = graph.pointwise(Pointwise::Sub, dprobs, Some(delta))?;
        let dscores = graph.pointwise(Pointwise::Mul, centered, Some(probs))?;
        let scale = graph.scalar(f32::from_bits(self.scale))?;
        let dscores = graph.pointwise(Pointwise::Mul, dscores, Some(scale))?;
        let transposed = self.transposed_scores(graph, dscores)?;
        self.key_gradient(graph, (transposed, q), dk)?;

        let (dims, strides) = (swapped(k.dims), swapped(k.strides));
        let keys = graph.intermediate(DataType::F32, dims, strides)?;
        graph.reshape(k, keys)?;
        if deterministic {
            return graph.matmul(dscores, keys, dq);
        }
        let sums = graph.tensor(DQ_SUMS, DataType::F32, dq.dims, contiguous(dq.dims))?;
        graph.matmul(dscores, keys, sums)?;
        graph.pointwise_to(Pointwise::Identity, sums, None, dq)
    }

    /// scale q kᵀ
    fn scores(&self, graph: &mut Graph, q: Tensor, k: Tensor) -> Result<Tensor> {
        let scores = graph.intermediate(DataType::F32, self.score_dims(), self.score_strides())?;
        graph.matmul(q, k, scores)?;
        let scale = graph.scalar(f32::from_bits(self.scale))?;
        graph.pointwise(Pointwise::Mul, scores, Some(scale))
    }

    fn masked(&self, graph: &mut Graph, scores: Tensor) -> Result<Tensor> {
        match self.causal {
            true => graph.lower_triangle(scores, f32::NEG_INFINITY),
            false => Ok(scores),
        }
    }

    /// (batch, heads, q_len, k_len) to (batch, heads, k_len, q_len), in bf16.
    fn transposed_scores(&self, graph: &mut Graph, scores: Tensor) -> Result<Tensor> {
        let (dims, strides) = (swapped(scores.dims), swapped(scores.strides));
        let to = graph.intermediate(DataType::Bf16, dims, strides)?;
        graph.reshape(scores, to)?;
        Ok(to)
    }

    /// `to` = a · b, summed over the heads of a group.
    fn key_gradient(&self, graph: &mut Graph, (a, b): (Tensor, Tensor), to: Tensor) -> Result<()> {
        if self.heads == self.kv_heads {
            return graph.matmul(a, b, to);
        }
        let dims = [self.batch, self.heads, self.k_len, self.head_dim];
        let all_heads = graph.intermediate(DataType::Bf16, dims, contiguous(dims))?;
        graph.matmul(a, b, all_heads)?;
        graph.reduce(Reduction::Sum, all_heads, to)
    }

    fn queries(&self, id: i64, stride: i64) -> Operand {
        let dims = [self.batch, self.heads, self.q_len, self.head_dim];
        Operand::new(id, dims, stride)
    }

    fn keys(&self, id: i64, stride: i64) -> Operand {
        let dims = [self.batch, self.kv_heads, self.k_len, self.head_dim];
        Operand::new(id, dims, stride)
    }

    fn score_dims(&self) -> [i64; 4] {
        [self.batch, self.heads, self.q_len, self.k_len]
    }

    fn score_strides(&self) -> [i64; 4] {
        contiguous(self.score_dims())
    }

    /// A number per query.
    fn row_dims(&self) -> [i64; 4] {
        [self.batch, self.heads, self.q_len, 1]
    }

    fn row_strides(&self) -> [i64; 4] {
        contiguous(self.row_dims())
    }
}

/// Columns of a matrix of tokens, as (batch, heads, len, head_dim).
#[derive(Clone, Copy)]
struct Operand {
    id: i64,
    dims: [i64; 4],
    strides: [i64; 4],
}

impl Operand {
    fn new(id: i64, dims: [i64; 4], stride: i64) -> Operand {
        let [_, _, len, head_dim] = dims;
        Operand { id, dims, strides: [len * stride, head_dim, stride, 1] }
    }

    /// (batch, heads, head_dim, len)
    fn transposed(self) -> Operand {
        Operand { dims: swapped(self.dims), strides: swapped(self.strides), ..self }
    }

    fn declare(&self, graph: &mut Graph) -> Result<Tensor> {
        graph.tensor(self.id, DataType::Bf16, self.dims, self.strides)
    }
}

fn swapped([a, b, c, d]: [i64; 4]) -> [i64; 4] {
    [a, b, d, c]
}

fn contiguous([_, b, c, d]: [i64; 4]) -> [i64; 4] {
    [b * c * d, c * d, d, 1]
}
