//! Self-attention of whole sequences, forward and backward.

use super::*;

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
