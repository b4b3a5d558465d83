//! Attention against the reference: head sizes, lengths, groups, positions, dtypes and threads.

mod blocks;

use half::bf16;
use lockstep_kernels::AttentionShape;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::attention::{self, DeltaFrom, Gradients, Rows, RowsMut, Saved};
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::reference::attention as reference;

/// heads, kv_heads, head_dim, q_len, k_len, q_start, k_start
type Case = [usize; 7];

const CASES: [Case; 19] = [
    [2, 2, 8, 1, 1, 0, 0],
    [2, 1, 16, 7, 7, 0, 0],
    [2, 2, 32, 64, 64, 0, 0],
    [1, 1, 64, 65, 65, 0, 0],
    [2, 1, 24, 130, 130, 0, 0],
    [4, 2, 64, 130, 130, 0, 0],
    [3, 1, 40, 65, 65, 0, 0],
    [6, 2, 128, 70, 70, 0, 0],
    [1, 1, 256, 33, 33, 0, 0],
    // Generation with a key-value cache.
    [4, 2, 64, 1, 130, 129, 0],
    [4, 4, 32, 7, 65, 58, 0],
    [2, 1, 80, 3, 40, 37, 0],
    // Key blocks of other ranks: all, some or none of them in the past.
    [2, 1, 32, 64, 65, 200, 100],
    [2, 2, 64, 130, 64, 64, 100],
    [2, 1, 16, 65, 130, 30, 60],
    [2, 2, 32, 7, 65, 10, 100],
    [2, 1, 48, 200, 37, 0, 64],
    [1, 1, 8, 65, 1, 0, 40],
    [2, 1, 120, 129, 257, 128, 0],
];

const BATCH: usize = 2;

fn shape_of(case: Case) -> AttentionShape {
    let [heads, kv_heads, head_dim, q_len, k_len, q_start, k_start] = case;
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionShape {
        batch: BATCH,
        heads,
        kv_heads,
        head_dim,
        q_len,
        k_len,
        q_start,
        k_start,
        scale,
    }
}

/// Pseudo-random numbers in -1..1, the same in every run.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// Inputs of one attention: q in one matrix, k and v in another, each with unrelated columns.
struct Problem<E> {
    shape: AttentionShape,
    q: Vec<E>,    // (tokens, 3 + heads * head_dim + 5)
    kv: Vec<E>,   // (tokens, 1 + 2 * kv_heads * head_dim + 2)
    dout: Vec<E>, // (tokens, heads * head_dim)
}

#[derive(PartialEq, Debug)]
struct Answer<E> {
    out: Vec<E>,
    lse: Vec<f32>,
    dq: Vec<E>,
    dkv: Vec<E>,
}

impl<E: Float> Problem<E> {
    fn new(shape: AttentionShape) -> Problem<E> {
        let tokens = shape.batch * shape.q_len;
        let make = |len, seed, size: f32| {
            numbers(len, seed).iter().map(|x| E::round_from(x * size)).collect()
        };
        Problem {
            shape,
            q: make(tokens * q_stride(&shape), 1, 3.0),
            kv: make(shape.batch * shape.k_len * kv_stride(&shape), 2, 2.0),
            dout: make(tokens * shape.heads * shape.head_dim, 3, 1.0),
        }
    }

    fn rows(&self) -> [Rows<'_, E>; 3] {
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        let stride = kv_stride(&self.shape);
        [
            Rows { data: &self.q, offset: 3, stride: q_stride(&self.shape) },
            Rows { data: &self.kv, offset: 1, stride },
            Rows { data: &self.kv, offset: 1 + kv_heads * head_dim, stride },
        ]
    }

    fn forward(&self, cpu: &Cpu) -> (Vec<E>, Vec<f32>) {
        let AttentionShape { batch, heads, head_dim, q_len, .. } = self.shape;
        // Previous contents must not matter.
        let mut out = vec![E::round_from(f32::NAN); batch * q_len * heads * head_dim];
        let mut lse = vec![f32::NAN; batch * heads * q_len];
        attention::forward(cpu, &self.shape, self.rows(), &mut out, &mut lse);
        (out, lse)
    }

    fn backward(&self, cpu: &Cpu, out: &[E], lse: &[f32]) -> (Vec<E>, Vec<E>) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let mut dq = vec![E::round_from(7.0); self.q.len()];
        let mut dkv = vec![E::round_from(7.0); self.kv.len()];
        let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let (stride, parts) = (q_stride(&self.shape), [0..3, 3..3 + width]);
        let [_, to_q] = RowsMut::columns(&mut dq, stride, parts);
        let parts = [1..1 + kv_width, 1 + kv_width..1 + 2 * kv_width];
        let [to_k, to_v] = RowsMut::columns(&mut dkv, kv_stride(&self.shape), parts);
        let saved = Saved { dout: &self.dout, lse, delta: DeltaFrom::Output(out) };
        let gradients = Gradients { dq: to_q, dk: to_k, dv: to_v, accumulate: false };
        attention::backward(cpu, &self.shape, self.rows(), saved, gradients);
        (dq, dkv)
    }

    fn solve(&self, cpu: &Cpu) -> Answer<E> {
        let (out, lse) = self.forward(cpu);
        let (dq, dkv) = self.backward(cpu, &out, &lse);
        Answer { out, lse, dq, dkv }
    }

    /// Inputs of the reference, in f64.
    fn inputs(&self) -> reference::Inputs {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let stride = kv_stride(&self.shape);
        reference::Inputs {
            q: columns(&self.q, q_stride(&self.shape), 3, width),
            k: columns(&self.kv, stride, 1, kv_width),
            v: columns(&self.kv, stride, 1 + kv_width, kv_width),
        }
    }
}

fn q_stride(shape: &AttentionShape) -> usize {
    3 + shape.heads * shape.head_dim + 5
}

fn kv_stride(shape: &AttentionShape) -> usize {
    1 + 2 * shape.kv_heads * shape.head_dim + 2
}

fn columns<E: Float>(data: &[E], stride: usize, offset: usize, width: usize) -> Vec<f64> {
    data.chunks(stride)
        .flat_map(|row| &row[offset..offset + width])
        .map(|x| f64::from(x.as_f32()))
        .collect()
}

fn to_f64<E: Float>(data: &[E]) -> Vec<f64> {
    data.iter().map(|x| f64::from(x.as_f32())).collect()
}

/// Distance relative to the magnitude of the numbers. Values that should be zero are compared with the rounding of sums
/// of numbers of about one.
fn distance(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    let size = theirs.iter().filter(|x| x.is_finite()).fold(0.1f64, |a, x| a.max(x.abs()));
    let apart = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() / size };
    ours.iter()
        .zip(theirs)
        .map(apart)
        .fold(0.0, |a, b| if b.is_nan() { f64::NAN } else { a.max(b) })
}

fn assert_near(ours: &[f64], theirs: &[f64], tolerance: f64, what: &str) {
    let apart = distance(ours, theirs);
    assert!(apart <= tolerance, "{what}: differs by {apart:.2e}, tolerance {tolerance:.0e}");
}

fn matches_the_reference<E: Float>(cpu: &Cpu, case: Case, tolerance: f64) {
    let problem = Problem::<E>::new(shape_of(case));
    let name = |what| format!("{what} at {:?} in {} of {case:?}", cpu.level, E::DTYPE);
    let (inputs, dout) = (problem.inputs(), to_f64(&problem.dout));
    let expected = reference::forward(&problem.shape, &inputs);
    let grads = reference::backward(&problem.shape, &inputs, &expected, &dout);
    let answer = problem.solve(cpu);
    let AttentionShape { heads, kv_heads, head_dim, .. } = problem.shape;
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let (stride, kv_stride) = (q_stride(&problem.shape), kv_stride(&problem.shape));
    assert_near(&to_f64(&answer.out), &expected.out, tolerance, &name("out"));
    assert_near(&to_f64(&answer.lse), &expected.lse, tolerance, &name("lse"));
    assert_near(&columns(&answer.dq, stride, 3, width), &grads.q, tolerance, &name("dq"));
    assert_near(&columns(&answer.dkv, kv_stride, 1, kv_width), &grads.k, tolerance, &name("dk"));
    assert_near(
        &columns(&answer.dkv, kv_stride, 1 + kv_width, kv_width),
        &grads.v,
        tolerance,
        &name("dv"),
    );
    // Unrelated columns are not written.
    let seven = |x: f64| x == 7.0;
    assert!(columns(&answer.dq, stride, 0, 3).into_iter().all(seven), "{}", name("left of dq"));
    assert!(
        columns(&answer.dq, stride, 3 + width, 5).into_iter().all(seven),
        "{}",
        name("right of dq")
    );
    assert!(columns(&answer.dkv, kv_stride, 0, 1).into_iter().all(seven), "{}", name("left of dk"));
    assert!(
        columns(&answer.dkv, kv_stride, 1 + 2 * kv_width, 2).into_iter().all(seven),
        "{}",
        name("right of dv")
    );
}

fn levels() -> impl Iterator<Item = Level> {
    Level::of_this_machine().and_below()
}

#[test]
fn matches_the_reference_in_f32() {
    for cpu in levels().map(|level| Cpu::at(level, 1)) {
        CASES.iter().for_each(|case| matches_the_reference::<f32>(&cpu, *case, 2e-5));
    }
}

#[test]
fn matches_the_reference_in_bf16() {
    for cpu in levels().map(|level| Cpu::at(level, 1)) {
        CASES.iter().for_each(|case| matches_the_reference::<bf16>(&cpu, *case, 2e-2));
    }
}

#[test]
fn all_head_dims_are_supported() {
    for cpu in levels().map(|level| Cpu::at(level, 1)) {
        for head_dim in [1, 3, 13, 72, 100] {
            matches_the_reference::<f32>(&cpu, [2, 1, head_dim, 20, 20, 0, 0], 2e-5);
            matches_the_reference::<bf16>(&cpu, [2, 1, head_dim, 20, 20, 0, 0], 2e-2);
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    for level in levels() {
        let one = Cpu::at(level, 1);
        for threads in [2, 3] {
            let more = Cpu::at(level, threads);
            for case in CASES {
                let (wide, narrow) =
                    (Problem::<f32>::new(shape_of(case)), Problem::<bf16>::new(shape_of(case)));
                assert!(
                    wide.solve(&one) == wide.solve(&more),
                    "{level:?}, {threads} threads, f32, {case:?}"
                );
                assert!(
                    narrow.solve(&one) == narrow.solve(&more),
                    "{level:?}, {threads} threads, bf16, {case:?}"
                );
            }
        }
    }
}

#[test]
fn large_scores_neither_overflow_nor_vanish() {
    for cpu in levels().map(|level| Cpu::at(level, 1)) {
        let mut problem = Problem::<f32>::new(AttentionShape {
            scale: 30.0,
            ..shape_of([2, 1, 32, 70, 70, 0, 0])
        });
        problem.q.iter_mut().for_each(|x| *x *= 4.0);
        let (out, lse) = problem.forward(&cpu);
        let expected = reference::forward(&problem.shape, &problem.inputs());
        assert_near(&to_f64(&out), &expected.out, 1e-2, &format!("out at {:?}", cpu.level));
        assert_near(&to_f64(&lse), &expected.lse, 1e-5, &format!("lse at {:?}", cpu.level));
    }
}

/// A NaN key affects exactly the queries that attend to it.
#[test]
fn nan_keys_propagate_to_their_queries() {
    for cpu in levels().map(|level| Cpu::at(level, 1)) {
        for key in [0, 5, 66] {
            let mut problem = Problem::<f32>::new(AttentionShape {
                batch: 1,
                ..shape_of([1, 1, 16, 70, 70, 0, 0])
            });
            problem.kv[key * kv_stride(&problem.shape) + 1] = f32::NAN;
            let (out, lse) = problem.forward(&cpu);
            for (i, (row, lse)) in out.chunks(16).zip(lse).enumerate() {
                assert_eq!(
                    lse.is_nan(),
                    i >= key,
                    "lse of query {i} with key {key} at {:?}",
                    cpu.level
                );
                assert_eq!(
                    row[3].is_nan(),
                    i >= key,
                    "out of query {i} with key {key} at {:?}",
                    cpu.level
                );
            }
        }
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    for case in [[2, 1, 3, 4, 4, 0, 0], [2, 2, 2, 3, 5, 1, 0], [1, 1, 2, 5, 3, 0, 2]] {
        let problem = Problem::<f32>::new(shape_of(case));
        let (inputs, dout) = (problem.inputs(), to_f64(&problem.dout));
        let outputs = reference::forward(&problem.shape, &inputs);
        let grads = reference::backward(&problem.shape, &inputs, &outputs, &dout);
        let loss = |inputs: &reference::Inputs| -> f64 {
            reference::forward(&problem.shape, inputs)
                .out
                .iter()
                .zip(&dout)
                .map(|(a, b)| a * b)
                .sum()
        };
        let slope = |which: fn(&mut reference::Inputs) -> &mut Vec<f64>, i: usize| {
            let step = 1e-5;
            let moved = |by: f64| {
                let mut inputs = problem.inputs();
                which(&mut inputs)[i] += by;
                loss(&inputs)
            };
            (moved(step) - moved(-step)) / (2.0 * step)
        };
        for (i, dq) in grads.q.iter().enumerate() {
            assert!((slope(|inputs| &mut inputs.q, i) - dq).abs() < 1e-7, "dq[{i}] of {case:?}");
        }
        for (i, dk) in grads.k.iter().enumerate() {
            assert!((slope(|inputs| &mut inputs.k, i) - dk).abs() < 1e-7, "dk[{i}] of {case:?}");
        }
        for (i, dv) in grads.v.iter().enumerate() {
            assert!((slope(|inputs| &mut inputs.v, i) - dv).abs() < 1e-7, "dv[{i}] of {case:?}");
        }
    }
}

#[test]
#[should_panic(expected = "columns 2..6 and 0..4 overlap")]
fn overlapping_columns_panic() {
    RowsMut::columns(&mut [0f32; 16], 8, [0..4, 2..6]);
}

#[test]
#[should_panic(expected = "k: 4 rows of 8 at offset 8 and stride 16 need 64 elements, not 60")]
fn short_slices_panic() {
    let shape = AttentionShape { batch: 1, q_len: 4, k_len: 4, ..shape_of([1, 1, 8, 4, 4, 0, 0]) };
    let (whole, short) = (vec![0f32; 64], vec![0f32; 60]);
    let rows = |data| Rows { data, offset: 8, stride: 16 };
    attention::forward(
        &Cpu::new(1),
        &shape,
        [rows(&whole), rows(&short), rows(&whole)],
        &mut [0.0; 32],
        &mut [0.0; 4],
    );
}
