//! Attention over sequences that are split across ranks equals attention over whole sequences.

use half::bf16;
use lockstep_comm::{Cause, Error, Options, on_threads, on_threads_with};
use lockstep_kernels::{AttentionOutput, AttentionShape, Device, Dtype, Float, Tag, Tensor};
use lockstep_parallel::context::{AttentionBackward, AttentionShard, Context, Heads, Sent, sent};
use lockstep_plan::context::{ContextKind, check, degrees, multiple, runs};

/// Whole sequences.
#[derive(Clone, Copy, Debug)]
struct Problem {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    kind: ContextKind,
    ranks: usize,
}

/// Results for whole sequences, sequence by sequence.
#[derive(Clone, PartialEq, Debug)]
struct Answer {
    out: Vec<f32>,
    dqkv: Vec<f32>,
}

impl Problem {
    fn heads(&self) -> Heads {
        let Problem { batch, heads, kv_heads, head_dim, .. } = *self;
        Heads { batch, heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
    }

    fn columns(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn qkv(&self) -> Vec<f32> {
        numbers(self.batch * self.seq * self.columns(), 1, 2.0)
    }

    fn dout(&self) -> Vec<f32> {
        numbers(self.batch * self.seq * self.width(), 2, 1.0)
    }

    fn degrees(&self, cut: Cut) -> (usize, usize) {
        degrees(cut.kind, cut.ranks, self.heads, self.kv_heads)
    }

    /// On one rank, without a context.
    fn whole<E: Float>(&self) -> Answer {
        let device = Device::cpu(1);
        let (tokens, rows) = (self.batch * self.seq, self.batch * self.heads);
        let shape =
            AttentionShape::square(self.batch, self.seq, self.heads, self.kv_heads, self.head_dim);
        let qkv = tensor::<E>(&device, tokens, &self.qkv());
        let dout = tensor::<E>(&device, tokens, &self.dout());
        let mut out = device.empty(tokens, self.width(), E::DTYPE, Tag::Activations);
        let mut lse = device.empty(rows, self.seq, Dtype::F32, Tag::Activations);
        device.attention(&shape, qkv.view(), out.view_mut(), lse.view_mut());
        let mut dqkv = device.empty(tokens, self.columns(), E::DTYPE, Tag::Buffers);
        let output = AttentionOutput { out: out.view(), lse: lse.view(), dout: dout.view() };
        device.attention_backward(&shape, qkv.view(), output, dqkv.view_mut());
        Answer { out: values::<E>(&out), dqkv: values::<E>(&dqkv) }
    }

    /// On the ranks of a context, reassembled.
    fn sharded<E: Float>(&self, cut: Cut, threads: usize) -> Answer {
        let parts = on_threads(cut.ranks, |world| {
            let context = Context::new(&world, cut.kind, self.seq, self.degrees(cut)).unwrap();
            self.on_rank::<E>(&context, world.rank(), &Device::cpu(threads)).unwrap()
        });
        let gathered = |cols: usize, part: fn(&Answer) -> &[f32]| {
            let mut whole = vec![f32::NAN; self.batch * self.seq * cols];
            for (index, answer) in parts.iter().enumerate() {
                let rows = part(answer).chunks(cols);
                for (row, place) in rows.zip(self.places(cut, index)) {
                    whole[place * cols..(place + 1) * cols].copy_from_slice(row);
                }
            }
            whole
        };
        Answer {
            out: gathered(self.width(), |answer| &answer.out),
            dqkv: gathered(self.columns(), |answer| &answer.dqkv),
        }
    }

    /// The positions of a rank's rows in the whole sequences.
    fn places(&self, cut: Cut, index: usize) -> Vec<usize> {
        let runs = runs(cut.kind, self.seq, self.degrees(cut), index);
        let mut places = Vec::new();
        for run in runs {
            for sequence in 0..self.batch {
                places.extend((run.start..run.end()).map(|at| sequence * self.seq + at));
            }
        }
        places
    }

    fn on_rank<E: Float>(
        &self,
        context: &Context,
        rank: usize,
        device: &Device,
    ) -> Result<Answer, Error> {
        let (ulysses, ring) = context.degrees();
        let places = self.places(Cut { kind: context.kind(), ranks: ulysses * ring }, rank);
        let own = |whole: Vec<f32>, cols: usize| -> Tensor {
            let rows = places.iter().flat_map(|place| &whole[place * cols..(place + 1) * cols]);
            tensor::<E>(device, places.len(), &rows.copied().collect::<Vec<f32>>())
        };
        let qkv = own(self.qkv(), self.columns());
        let dout = own(self.dout(), self.width());
        let mut out = device.empty(places.len(), self.width(), E::DTYPE, Tag::Activations);
        let saved = context.forward(device, &self.heads(), qkv, out.view_mut())?;
        let mut dqkv = device.empty(places.len(), self.columns(), E::DTYPE, Tag::Activations);
        let (out_view, dqkv_view) = (out.view(), dqkv.view_mut());
        let backward =
            AttentionBackward { saved, out: out_view, dout: dout.view(), dqkv: dqkv_view };
        context.backward(device, &self.heads(), backward)?;
        Ok(Answer { out: values::<E>(&out), dqkv: values::<E>(&dqkv) })
    }

    /// Every valid kind of context with these sizes.
    fn cuts(&self) -> Vec<Cut> {
        use ContextKind::*;
        let all = [1, 2, 3, 4, 6]
            .into_iter()
            .flat_map(|ranks| [Ring, Ulysses, Both].map(|kind| Cut { kind, ranks }));
        let fits =
            |cut: &Cut| check(cut.kind, cut.ranks, self.seq, self.heads, self.kv_heads).is_ok();
        all.filter(fits).collect()
    }
}

/// Reproducible numbers in -size..size.
fn numbers(len: usize, seed: u64, size: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
    };
    (0..len).map(next).collect()
}

fn tensor<E: Float>(device: &Device, rows: usize, values: &[f32]) -> Tensor {
    let mut tensor = device.empty(rows, values.len() / rows, E::DTYPE, Tag::Buffers);
    let elements: Vec<E> = values.iter().map(|x| E::round_from(*x)).collect();
    device.write(tensor.view_mut(), &elements);
    tensor
}

fn values<E: Float>(tensor: &Tensor) -> Vec<f32> {
    let mut elements = vec![E::default(); tensor.len()];
    Device::cpu(1).read(tensor.view(), &mut elements);
    elements.iter().map(|x| x.as_f32()).collect()
}

/// Maximum difference between columns of two matrices, relative to the largest element.
fn difference(ours: &[f32], theirs: &[f32], stride: usize, columns: std::ops::Range<usize>) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let of = |x: &[f32]| -> Vec<f32> {
        x.chunks(stride).flat_map(|row| row[columns.clone()].to_vec()).collect()
    };
    let (ours, theirs) = (of(ours), of(theirs));
    let size = theirs.iter().fold(0f32, |a, x| a.max(x.abs()));
    let worst = |a: f32, (x, y): (&f32, &f32)| {
        let difference = (x - y).abs() / size;
        if difference.is_nan() { f32::NAN } else { a.max(difference) }
    };
    ours.iter().zip(&theirs).fold(0.0, worst)
}

fn assert_close(problem: &Problem, cut: Cut, ours: &Answer, whole: &Answer, tolerance: f32) {
    let (width, columns) = (problem.width(), problem.columns());
    let kv = problem.kv_heads * problem.head_dim;
    let [dq, dk, dv] = [0..width, width..width + kv, width + kv..columns]
        .map(|part| difference(&ours.dqkv, &whole.dqkv, columns, part));
    let out = difference(&ours.out, &whole.out, width, 0..width);
    for (name, difference) in [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)] {
        assert!(
            difference <= tolerance,
            "{name} differs by {difference:.1e}: {cut:?} of {problem:?}"
        );
    }
}

/// batch, seq, heads, kv_heads, head_dim
const PROBLEMS: [[usize; 5]; 8] = [
    [1, 24, 6, 6, 8],
    [2, 24, 6, 3, 8],
    [3, 24, 6, 1, 16],
    [2, 48, 12, 2, 8],
    [1, 96, 12, 4, 24],
    [2, 144, 4, 2, 32],
    [1, 600, 6, 2, 16],
    // Ring of three with Ulysses pairs, and an odd Ulysses degree.
    [2, 36, 3, 1, 8],
];

fn problems() -> impl Iterator<Item = Problem> {
    PROBLEMS.into_iter().map(|[batch, seq, heads, kv_heads, head_dim]| Problem {
        batch,
        seq,
        heads,
        kv_heads,
        head_dim,
    })
}

fn sharded_equals_whole<E: Float>(tolerance: f32) {
    let mut seen = Vec::new();
    for problem in problems() {
        let whole = problem.whole::<E>();
        for cut in problem.cuts() {
            let ours = problem.sharded::<E>(cut, 1);
            assert_close(&problem, cut, &ours, &whole, tolerance);
            if cut.ranks == 1 {
                assert!(ours == whole, "one rank must give the same bits");
            }
            seen.push((cut.ranks, problem.degrees(cut)));
        }
    }
    for wanted in
        [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 6), (6, 1), (2, 3), (3, 2)]
    {
        assert!(seen.iter().any(|(_, degrees)| *degrees == wanted), "{wanted:?} was not tested");
    }
}

#[test]
fn sharded_equals_whole_in_f32() {
    sharded_equals_whole::<f32>(1e-5);
}

#[test]
fn sharded_equals_whole_in_bf16() {
    sharded_equals_whole::<bf16>(1e-2);
}

#[test]
fn bits_do_not_depend_on_timing_or_threads() {
    let problem = Problem { batch: 2, seq: 144, heads: 6, kv_heads: 2, head_dim: 16 };
    for cut in problem.cuts() {
        let (in_f32, in_bf16) = (problem.sharded::<f32>(cut, 1), problem.sharded::<bf16>(cut, 1));
        for threads in [1, 1, 2] {
            assert!(
                problem.sharded::<f32>(cut, threads) == in_f32,
                "{cut:?} f32, {threads} threads"
            );
            let repeated = problem.sharded::<bf16>(cut, threads);
            assert!(repeated == in_bf16, "{cut:?} bf16, {threads} threads");
        }
    }
}

#[test]
fn sent_bytes_equal_the_formulas() {
    check_sent_bytes::<f32>();
    check_sent_bytes::<bf16>();
}

fn check_sent_bytes<E: Float>() {
    // In-place access is not counted as traffic.
    let options = Options { direct_access: false, ..Options::default() };
    for problem in problems() {
        for cut in problem.cuts() {
            let degrees = problem.degrees(cut);
            on_threads_with(&options, cut.ranks, |world| {
                let context = Context::new(&world, cut.kind, problem.seq, degrees).unwrap();
                let counted = || context.traffic().bytes;
                let (device, heads) = (Device::cpu(1), problem.heads());
                let tokens = problem.batch * problem.seq / cut.ranks;
                let qkv = tensor::<E>(&device, tokens, &vec![0.5; tokens * problem.columns()]);
                let dout = tensor::<E>(&device, tokens, &vec![0.5; tokens * problem.width()]);
                let (mut out, mut dqkv) = (dout.clone(), qkv.clone());
                for zeros in [&mut out, &mut dqkv] {
                    *zeros = device.zeros(tokens, zeros.cols(), E::DTYPE, Tag::Buffers);
                }
                let start = counted();
                let saved = context.forward(&device, &heads, qkv, out.view_mut()).unwrap();
                let forward_end = counted();
                let (out, dqkv) = (out.view(), dqkv.view_mut());
                let backward = AttentionBackward { saved, out, dout: dout.view(), dqkv };
                context.backward(&device, &heads, backward).unwrap();
                let measured =
                    Sent { forward: forward_end - start, backward: counted() - forward_end };
                let Heads { heads, kv_heads, head_dim, .. } = heads;
                let bytes = E::DTYPE.bytes();
                let shard = AttentionShard { tokens, heads, kv_heads, head_dim, bytes };
                assert_eq!(measured, sent(degrees, &shard), "{cut:?} of {problem:?}");
            });
        }
    }
}

#[test]
fn one_rank_allocates_only_the_log_sum_exp() {
    let problem = Problem { batch: 2, seq: 40, heads: 4, kv_heads: 2, head_dim: 16 };
    let (device, heads) = (Device::cpu(1), problem.heads());
    let context = Context::alone(problem.seq);
    let tokens = problem.batch * problem.seq;
    let qkv = tensor::<f32>(&device, tokens, &problem.qkv());
    let dout = tensor::<f32>(&device, tokens, &problem.dout());
    let mut out = device.empty(tokens, problem.width(), Dtype::F32, Tag::Activations);
    let mut dqkv = device.empty(tokens, problem.columns(), Dtype::F32, Tag::Buffers);
    let before = device.memory();
    device.reset_peaks();
    let saved = context.forward(&device, &heads, qkv, out.view_mut()).unwrap();
    let (out, dqkv) = (out.view(), dqkv.view_mut());
    let backward = AttentionBackward { saved, out, dout: dout.view(), dqkv };
    context.backward(&device, &heads, backward).unwrap();
    let lse = tokens * problem.heads * 4;
    assert_eq!(device.memory().total.peak, before.total.now + lse);
}

#[test]
fn buffers_are_freed() {
    let problem = Problem { batch: 2, seq: 48, heads: 6, kv_heads: 3, head_dim: 16 };
    for cut in problem.cuts() {
        on_threads(cut.ranks, |world| {
            let degrees = problem.degrees(cut);
            let context = Context::new(&world, cut.kind, problem.seq, degrees).unwrap();
            let device = Device::cpu(1);
            problem.on_rank::<bf16>(&context, world.rank(), &device).unwrap();
            assert_eq!(device.memory().total.now, 0, "{cut:?}");
        });
    }
}

/// All other ranks fail, since every output depends on every rank.
#[test]
fn a_failed_rank_is_an_error_on_all_others() {
    let problem = Problem { batch: 1, seq: 48, heads: 4, kv_heads: 4, head_dim: 8 };
    for cut in problem.cuts().into_iter().filter(|cut| cut.ranks > 1) {
        for cause in [Cause::Failed, Cause::Left] {
            let errors = on_threads(cut.ranks, |world| {
                let degrees = problem.degrees(cut);
                let context = Context::new(&world, cut.kind, problem.seq, degrees).unwrap();
                let device = Device::cpu(1);
                problem.on_rank::<f32>(&context, world.rank(), &device).unwrap();
                world.barrier().unwrap();
                if world.rank() != 1 {
                    return problem.on_rank::<f32>(&context, world.rank(), &device).err();
                }
                if cause == Cause::Failed {
                    world.abort("the disk is full");
                }
                None
            });
            for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
                let error = error.unwrap_or_else(|| panic!("rank {rank} of {cut:?} saw no error"));
                let blame = (error.culprit(), error.cause());
                assert_eq!(blame, (Some(1), Some(cause)), "{cut:?}: {error}");
            }
        }
    }
}

#[test]
fn invalid_degrees_and_lengths_are_errors() {
    let errors = on_threads(4, |world| {
        let refused = |seq, degrees| {
            Context::new(&world, ContextKind::Ring, seq, degrees).err().unwrap().to_string()
        };
        (refused(16, (1, 3)), refused(multiple((1, 4)) + 1, (1, 4)))
    });
    for (rank, (ranks, seq)) in errors.into_iter().enumerate() {
        let expected = "a group of 4 ranks cannot be split into ulysses=1 × ring=3";
        assert_eq!(ranks, format!("rank {rank}: {expected}"));
        assert!(seq.contains("seq=9 is not a multiple of 8"), "{seq}");
    }
}
