//! Attention against the reference: head sizes, groups, lengths, positions and dtypes, each computed twice.

use half::bf16;
use lockstep_kernels::reference::attention as reference;
use lockstep_kernels::{
    AttentionDelta, AttentionOutput, AttentionShape, Device, Dtype, Float, Tag, Tensor,
};

/// batch, heads, kv_heads, head_dim, seq
const SEQUENCES: [[usize; 5]; 14] = [
    [1, 1, 1, 16, 1],
    [2, 4, 1, 16, 7],
    [2, 2, 2, 13, 65],
    [1, 4, 1, 13, 130],
    [2, 3, 3, 64, 65],
    [2, 4, 1, 64, 129],
    [3, 2, 2, 64, 256],
    [1, 4, 1, 80, 200],
    [2, 2, 2, 80, 33],
    [1, 4, 4, 96, 131],
    [1, 4, 1, 128, 70],
    [2, 4, 1, 128, 137],
    [1, 2, 1, 160, 66],
    [1, 2, 1, 250, 35],
];

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

fn device() -> Device {
    Device::from_env(2)
}

/// Distance to the reference: rounding of sums in f32, and of probabilities and results in bf16.
fn tolerance(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 2e-5 } else { 2e-2 }
}

fn shape_of(
    [heads, kv_heads, head_dim, q_len, k_len, q_start, k_start]: [usize; 7],
) -> AttentionShape {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let batch = 2;
    AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, q_start, k_start, scale }
}

/// Pseudo-random numbers in -size..size, the same in every run.
fn numbers<E: Float>(len: usize, seed: u64, size: f32) -> Vec<E> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E::round_from(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size)
    };
    (0..len).map(next).collect()
}

/// A tensor with these elements.
fn tensor<E: Float>(device: &Device, rows: usize, values: &[E]) -> Tensor {
    let mut tensor = device.empty(rows, values.len() / rows, E::DTYPE, Tag::Activations);
    device.write(tensor.view_mut(), values);
    tensor
}

/// A tensor whose contents must not matter.
fn garbage(device: &Device, rows: usize, cols: usize, dtype: Dtype) -> Tensor {
    let mut tensor = device.empty(rows, cols, dtype, Tag::Activations);
    device.fill(tensor.view_mut(), f32::NAN);
    tensor
}

fn read<E: Float>(device: &Device, tensor: &Tensor) -> Vec<f64> {
    let mut values = vec![E::round_from(0.0); tensor.len()];
    device.read(tensor.view(), &mut values);
    values.iter().map(|x| f64::from(x.as_f32())).collect()
}

/// f32 or `E`, whichever the tensor holds.
fn read_any<E: Float>(device: &Device, tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        Dtype::F32 => read::<f32>(device, tensor),
        _ => read::<E>(device, tensor),
    }
}

fn columns(values: &[f64], stride: usize, from: usize, width: usize) -> Vec<f64> {
    values.chunks(stride).flat_map(|row| row[from..from + width].to_vec()).collect()
}

fn to_f64<E: Float>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| f64::from(x.as_f32())).collect()
}

/// Compares relative to the largest number, or to one if all are smaller: zeros are the result of the rounding of
/// sums of numbers of about one.
fn assert_near(ours: &[f64], theirs: &[f64], tolerance: f64, what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let size = theirs.iter().filter(|x| x.is_finite()).fold(1f64, |a, x| a.max(x.abs()));
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let apart = if a == b { 0.0 } else { (a - b).abs() / size };
        assert!(apart <= tolerance, "{what}: element {i} is {a}, not {b}: differs by {apart:.1e}");
    }
}

/// Bits of results, to compare two runs. All NaN count as the same.
fn assert_same_bits(first: &[Vec<f64>], second: &[Vec<f64>], what: &str) {
    for (i, (a, b)) in first.iter().zip(second).enumerate() {
        let same =
            a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
        assert!(same, "{what}: result {i} differs between two runs");
    }
}

/// Whole sequences of packed q, k and v.
struct Sequences<E> {
    shape: AttentionShape,
    qkv: Vec<E>,
    dout: Vec<E>,
}

impl<E: Float> Sequences<E> {
    fn new([batch, heads, kv_heads, head_dim, seq]: [usize; 5]) -> Sequences<E> {
        let shape = AttentionShape::square(batch, seq, heads, kv_heads, head_dim);
        let tokens = batch * seq;
        let qkv = numbers(tokens * (heads + 2 * kv_heads) * head_dim, 1, 2.0);
        Sequences { shape, qkv, dout: numbers(tokens * heads * head_dim, 2, 1.0) }
    }

    fn widths(&self) -> (usize, usize) {
        (self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim)
    }

    fn inputs(&self) -> reference::Inputs {
        let ((q, kv), qkv) = (self.widths(), to_f64(&self.qkv));
        let part = |from, width| columns(&qkv, q + 2 * kv, from, width);
        reference::Inputs { q: part(0, q), k: part(q, kv), v: part(q + kv, kv) }
    }

    /// out, lse, delta, the gradient from the output and the gradient from delta
    fn solve(&self, device: &Device) -> [Vec<f64>; 5] {
        let shape = &self.shape;
        let tokens = shape.batch * shape.q_len;
        let (qkv, dout) = (tensor(device, tokens, &self.qkv), tensor(device, tokens, &self.dout));
        let mut out = garbage(device, tokens, dout.cols(), E::DTYPE);
        let mut lse = garbage(device, shape.batch * shape.heads, shape.q_len, Dtype::F32);
        device.attention(shape, qkv.view(), out.view_mut(), lse.view_mut());
        let mut delta = garbage(device, tokens, shape.heads, Dtype::F32);
        device.attention_delta(out.view(), dout.view(), delta.view_mut());

        let mut dqkv = garbage(device, tokens, qkv.cols(), E::DTYPE);
        let output = AttentionOutput { out: out.view(), lse: lse.view(), dout: dout.view() };
        device.attention_backward(shape, qkv.view(), output, dqkv.view_mut());
        let mut from_delta = garbage(device, tokens, qkv.cols(), E::DTYPE);
        let given = AttentionDelta { dout: dout.view(), lse: lse.view(), delta: delta.view() };
        device.attention_backward_delta(shape, qkv.view(), given, from_delta.view_mut());
        [
            read::<E>(device, &out),
            read::<f32>(device, &lse),
            read::<f32>(device, &delta),
            read::<E>(device, &dqkv),
            read::<E>(device, &from_delta),
        ]
    }
}

fn check_sequences<E: Float>(device: &Device, case: [usize; 5]) {
    let problem = Sequences::<E>::new(case);
    let name = |what: &str| format!("{what} of {case:?} in {}", E::DTYPE);
    let answer = problem.solve(device);
    assert_same_bits(&answer, &problem.solve(device), &name("attention"));

    let (inputs, dout, within) = (problem.inputs(), to_f64(&problem.dout), tolerance(E::DTYPE));
    let expected = reference::forward(&problem.shape, &inputs);
    let grads = reference::backward(&problem.shape, &inputs, &expected, &dout);
    let [out, lse, delta, dqkv, from_delta] = answer;
    assert_near(&out, &expected.out, within, &name("out"));
    assert_near(&lse, &expected.lse, within, &name("lse"));
    let products: Vec<f64> = expected.out.iter().zip(&dout).map(|(a, b)| a * b).collect();
    let sums: Vec<f64> =
        products.chunks(problem.shape.head_dim).map(|head| head.iter().sum()).collect();
    assert_near(&delta, &sums, within, &name("delta"));
    let (q, kv) = problem.widths();
    for (given, dqkv) in [("the output", dqkv), ("delta", from_delta)] {
        let part = |from, width| columns(&dqkv, q + 2 * kv, from, width);
        let name = |what: &str| format!("{} from {given}", name(what));
        assert_near(&part(0, q), &grads.q, within, &name("dq"));
        assert_near(&part(q, kv), &grads.k, within, &name("dk"));
        assert_near(&part(q + kv, kv), &grads.v, within, &name("dv"));
    }
}

#[test]
fn sequences_match_the_reference_in_f32() {
    let device = device();
    SEQUENCES.iter().for_each(|case| check_sequences::<f32>(&device, *case));
}

#[test]
fn sequences_match_the_reference_in_bf16() {
    let device = device();
    SEQUENCES.iter().for_each(|case| check_sequences::<bf16>(&device, *case));
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

/// A NaN key affects exactly the queries that attend to it.
#[test]
fn nan_keys_propagate_to_their_queries() {
    let device = device();
    for key in [0, 5, 66] {
        let mut problem = Sequences::<f32>::new([1, 1, 1, 16, 70]);
        problem.qkv[key * 48 + 16] = f32::NAN;
        let [out, lse, ..] = problem.solve(&device);
        for (i, (row, lse)) in out.chunks(16).zip(lse).enumerate() {
            assert_eq!(lse.is_nan(), i >= key, "lse of query {i} with key {key}");
            assert_eq!(row[3].is_nan(), i >= key, "out of query {i} with key {key}");
        }
    }
}

#[test]
fn large_scores_neither_overflow_nor_vanish() {
    let device = device();
    let mut problem = Sequences::<f32>::new([2, 2, 1, 32, 70]);
    problem.shape.scale = 60.0;
    let [out, lse, ..] = problem.solve(&device);
    let expected = reference::forward(&problem.shape, &problem.inputs());
    assert_near(&out, &expected.out, 1e-2, "out");
    assert_near(&lse, &expected.lse, 1e-5, "lse");
}

/// Deterministic backward passes of long sequences are computed in groups of heads on a GPU. They equal those of each
/// key head alone.
#[test]
#[ignore = "large; for GPUs"]
fn long_sequences_match_their_heads() {
    let device = device();
    let (heads, kv_heads, head_dim) = (32, 8, 64);
    let whole = Sequences::<bf16>::new([2, heads, kv_heads, head_dim, 4096]);
    let [out, lse, _, dqkv, from_delta] = whole.solve(&device);
    let (group, stride) = (heads / kv_heads, (heads + 2 * kv_heads) * head_dim);
    for head in 0..kv_heads {
        let starts = [head * group, heads + head, heads + kv_heads + head];
        let parts = starts.map(|start| start * head_dim).into_iter().zip([group, 1, 1]);
        let ranges: Vec<_> = parts.map(|(from, n)| from..from + n * head_dim).collect();
        let rows = |row: &[bf16]| -> Vec<bf16> {
            ranges.iter().flat_map(|range| row[range.clone()].to_vec()).collect()
        };
        let queries = ranges[0].clone();
        let part = Sequences {
            shape: AttentionShape { heads: group, kv_heads: 1, ..whole.shape },
            qkv: whole.qkv.chunks(stride).flat_map(rows).collect(),
            dout: whole
                .dout
                .chunks(heads * head_dim)
                .flat_map(|row| row[queries.clone()].to_vec())
                .collect(),
        };
        let [part_out, part_lse, _, part_dqkv, part_from_delta] = part.solve(&device);
        let own = columns(&out, heads * head_dim, queries.start, queries.len());
        assert_near(&own, &part_out, 1e-2, &format!("out of key head {head}"));
        let own: Vec<f64> = lse
            .chunks(heads * 4096)
            .flat_map(|rows| rows[head * group * 4096..(head + 1) * group * 4096].to_vec())
            .collect();
        assert_near(&own, &part_lse, 1e-5, &format!("lse of key head {head}"));
        for (whole, part) in [(&dqkv, &part_dqkv), (&from_delta, &part_from_delta)] {
            let own: Vec<f64> = whole
                .chunks(stride)
                .flat_map(|row| ranges.iter().flat_map(|range| row[range.clone()].to_vec()))
                .collect();
            assert_near(&own, part, 1e-2, &format!("gradient of key head {head}"));
        }
    }
}
