//! Attention over blocks of keys, forward and backward, and merged blocks.

use super::*;

/// heads, kv_heads, head_dim, q_len, k_len, q_start, k_start
const BLOCKS: [[usize; 7]; 13] = [
    // Generation with a key-value cache.
    [4, 1, 64, 1, 130, 129, 0],
    [4, 4, 32, 7, 65, 58, 0],
    // All keys are in the past.
    [2, 1, 13, 64, 65, 200, 100],
    [4, 1, 64, 130, 200, 300, 50],
    [2, 2, 128, 129, 131, 130, 0],
    [4, 1, 80, 140, 130, 129, 0],
    // Whole sequences at a later position.
    [4, 1, 64, 133, 133, 77, 77],
    // Some queries see no key, or none does.
    [2, 2, 64, 130, 64, 64, 100],
    [4, 1, 16, 65, 130, 30, 60],
    [2, 2, 96, 7, 65, 10, 100],
    [2, 1, 48, 200, 37, 0, 64],
    [1, 1, 128, 65, 1, 0, 40],
    [2, 1, 120, 129, 257, 128, 0],
];

/// Columns of the query rows that belong to other tensors, and of the rows of their gradient. Rows of odd heads are
/// not aligned.
fn other_columns(shape: &AttentionShape) -> usize {
    if shape.head_dim.is_multiple_of(8) { 8 } else { 5 }
}

/// A block of keys, with queries in the first columns of wider rows.
struct Block<E> {
    shape: AttentionShape,
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    dout: Vec<E>,
}

impl<E: Float> Block<E> {
    fn new(shape: AttentionShape) -> Block<E> {
        let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, .. } = shape;
        let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        Block {
            shape,
            q: numbers(batch * q_len * (width + other_columns(&shape)), 1, 2.0),
            k: numbers(batch * k_len * kv_width, 2, 2.0),
            v: numbers(batch * k_len * kv_width, 3, 2.0),
            dout: numbers(batch * q_len * width, 4, 1.0),
        }
    }

    /// The keys of a range, of one sequence.
    fn keys(&self, range: std::ops::Range<usize>) -> Block<E> {
        let width = self.shape.kv_heads * self.shape.head_dim;
        let part = |values: &[E]| values[range.start * width..range.end * width].to_vec();
        let k_start = self.shape.k_start + range.start;
        Block {
            shape: AttentionShape { k_len: range.len(), k_start, ..self.shape },
            q: self.q.clone(),
            k: part(&self.k),
            v: part(&self.v),
            dout: self.dout.clone(),
        }
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    /// Columns of the rows of queries.
    fn stride(&self) -> usize {
        self.width() + other_columns(&self.shape)
    }

    fn inputs(&self) -> reference::Inputs {
        let (q, width) = (to_f64(&self.q), self.width());
        let q = columns(&q, self.stride(), 0, width);
        reference::Inputs { q, k: to_f64(&self.k), v: to_f64(&self.v) }
    }

    fn tensors(&self, device: &Device) -> [Tensor; 3] {
        let AttentionShape { batch, q_len, k_len, .. } = self.shape;
        let keys = |values| tensor(device, batch * k_len, values);
        [tensor(device, batch * q_len, &self.q), keys(&self.k), keys(&self.v)]
    }

    /// Output and log-sum-exp.
    fn forward(&self, device: &Device, dtype: Dtype) -> (Tensor, Tensor) {
        let AttentionShape { batch, heads, q_len, .. } = self.shape;
        let [q, k, v] = self.tensors(device);
        let mut out = garbage(device, batch * q_len, self.width(), dtype);
        let mut lse = garbage(device, batch * heads, q_len, Dtype::F32);
        let qkv = [q.view(), k.view(), v.view()];
        device.attention_block(&self.shape, qkv, out.view_mut(), lse.view_mut());
        (out, lse)
    }

    /// Adds the gradients of this block to dq, dk and dv.
    fn backward(
        &self,
        device: &Device,
        (lse, delta): (&Tensor, &Tensor),
        gradients: [&mut Tensor; 3],
    ) {
        let [q, k, v] = self.tensors(device);
        let dout = tensor(device, self.shape.batch * self.shape.q_len, &self.dout);
        let given = AttentionDelta { dout: dout.view(), lse: lse.view(), delta: delta.view() };
        let gradients = gradients.map(|gradient| gradient.view_mut());
        device.attention_block_backward(
            &self.shape,
            [q.view(), k.view(), v.view()],
            given,
            gradients,
        );
    }

    /// Gradients of dq, dk and dv that hold 1, 2 and 3 before; dq has the unrelated columns of q.
    fn gradients(&self, device: &Device) -> [Tensor; 3] {
        let AttentionShape { batch, q_len, k_len, kv_heads, head_dim, .. } = self.shape;
        let (queries, keys) = (batch * q_len, batch * k_len);
        let sizes = [
            (queries, self.stride(), 1.0),
            (keys, kv_heads * head_dim, 2.0),
            (keys, kv_heads * head_dim, 3.0),
        ];
        sizes.map(|(rows, cols, value)| {
            let mut gradient = device.empty(rows, cols, Dtype::F32, Tag::Gradients);
            device.fill(gradient.view_mut(), value);
            gradient
        })
    }

    /// out in E and in f32, lse, dq, dk and dv
    fn solve(&self, device: &Device) -> [Vec<f64>; 6] {
        let (rounded, _) = self.forward(device, E::DTYPE);
        let (out, lse) = self.forward(device, Dtype::F32);
        let dout = tensor(device, out.rows(), &self.dout);
        let mut delta = garbage(device, out.rows(), self.shape.heads, Dtype::F32);
        device.attention_delta(rounded.view(), dout.view(), delta.view_mut());
        let [mut dq, mut dk, mut dv] = self.gradients(device);
        self.backward(device, (&lse, &delta), [&mut dq, &mut dk, &mut dv]);
        [
            read_any::<E>(device, &rounded),
            read::<f32>(device, &out),
            read::<f32>(device, &lse),
            read::<f32>(device, &dq),
            read::<f32>(device, &dk),
            read::<f32>(device, &dv),
        ]
    }
}

fn less(values: &[f64], by: f64) -> Vec<f64> {
    values.iter().map(|x| x - by).collect()
}

fn check_block<E: Float>(device: &Device, case: [usize; 7]) {
    let block = Block::<E>::new(shape_of(case));
    let name = |what: &str| format!("{what} of {case:?} in {}", E::DTYPE);
    let answer = block.solve(device);
    assert_same_bits(&answer, &block.solve(device), &name("a block"));

    let (inputs, dout, within) = (block.inputs(), to_f64(&block.dout), tolerance(E::DTYPE));
    let expected = reference::forward(&block.shape, &inputs);
    let grads = reference::backward(&block.shape, &inputs, &expected, &dout);
    let [rounded, out, lse, dq, dk, dv] = answer;
    assert_near(&rounded, &expected.out, within, &name("out"));
    assert_near(&out, &expected.out, within, &name("out in f32"));
    assert_near(&lse, &expected.lse, within, &name("lse"));
    let (width, stride) = (block.width(), block.stride());
    assert_near(&less(&columns(&dq, stride, 0, width), 1.0), &grads.q, within, &name("dq"));
    assert_near(&less(&dk, 2.0), &grads.k, within, &name("dk"));
    assert_near(&less(&dv, 3.0), &grads.v, within, &name("dv"));
    let others = columns(&dq, stride, width, stride - width);
    assert!(others.iter().all(|x| *x == 1.0), "{}", name("columns next to dq"));
}

#[test]
fn blocks_match_the_reference_in_f32() {
    let device = device();
    BLOCKS.iter().for_each(|case| check_block::<f32>(&device, *case));
}

#[test]
fn blocks_match_the_reference_in_bf16() {
    let device = device();
    BLOCKS.iter().for_each(|case| check_block::<bf16>(&device, *case));
}

/// Queries at 200..340 attend to keys 140..300, 0..140 and 300..450, one block after the other as in ring attention.
fn check_merge<E: Float>(device: &Device) {
    let shape = AttentionShape { batch: 1, ..shape_of([4, 1, 64, 140, 450, 200, 0]) };
    let whole = Block::<E>::new(shape);
    let blocks = [140..300, 0..140, 300..450];
    let (mut out, mut lse) = whole.keys(blocks[0].clone()).forward(device, Dtype::F32);
    for keys in &blocks[1..] {
        let (other, other_lse) = whole.keys(keys.clone()).forward(device, Dtype::F32);
        let (out, lse) = (out.view_mut(), lse.view_mut());
        device.attention_merge(&shape, out, lse, other.view(), other_lse.view());
    }
    let (inputs, dout, within) = (whole.inputs(), to_f64(&whole.dout), tolerance(E::DTYPE));
    let expected = reference::forward(&shape, &inputs);
    let grads = reference::backward(&shape, &inputs, &expected, &dout);
    assert_near(&read::<f32>(device, &out), &expected.out, within, "merged out");
    assert_near(&read::<f32>(device, &lse), &expected.lse, within, "merged lse");

    let rounded: Vec<E> =
        read::<f32>(device, &out).iter().map(|x| E::round_from(*x as f32)).collect();
    let (rounded, dout) =
        (tensor(device, out.rows(), &rounded), tensor(device, out.rows(), &whole.dout));
    let mut delta = garbage(device, out.rows(), shape.heads, Dtype::F32);
    device.attention_delta(rounded.view(), dout.view(), delta.view_mut());
    let [mut dq, ..] = whole.gradients(device);
    for keys in blocks {
        let block = whole.keys(keys.clone());
        let [_, mut dk, mut dv] = block.gradients(device);
        block.backward(device, (&lse, &delta), [&mut dq, &mut dk, &mut dv]);
        let width = shape.kv_heads * shape.head_dim;
        let part = keys.start * width..keys.end * width;
        let (dk, dv) = (read::<f32>(device, &dk), read::<f32>(device, &dv));
        assert_near(&less(&dk, 2.0), &grads.k[part.clone()], within, "dk of a block");
        assert_near(&less(&dv, 3.0), &grads.v[part], within, "dv of a block");
    }
    let dq = columns(&read::<f32>(device, &dq), whole.stride(), 0, whole.width());
    assert_near(&less(&dq, 1.0), &grads.q, within, "dq of all blocks");
}

#[test]
fn merged_blocks_match_the_whole() {
    let device = device();
    check_merge::<f32>(&device);
    check_merge::<bf16>(&device);
}

/// A query without visible keys on one side keeps the result of the other, and without any on both stays empty.
#[test]
fn merge_keeps_the_only_side() {
    let device = device();
    let shape = AttentionShape { batch: 1, ..shape_of([1, 1, 2, 3, 1, 0, 0]) };
    let none = f32::NEG_INFINITY;
    let mut out = tensor(&device, 3, &[1.0f32, 2.0, 0.0, 0.0, 0.0, 0.0]);
    let mut lse = tensor(&device, 1, &[0.5f32, none, none]);
    let other_out = tensor(&device, 3, &[0.0f32, 0.0, 3.0, 4.0, 0.0, 0.0]);
    let other_lse = tensor(&device, 1, &[none, 1.5, none]);
    let (to, to_lse) = (out.view_mut(), lse.view_mut());
    device.attention_merge(&shape, to, to_lse, other_out.view(), other_lse.view());
    assert_eq!(read::<f32>(&device, &out), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]);
    assert_eq!(read::<f32>(&device, &lse), [0.5, 1.5, f64::NEG_INFINITY]);
}
