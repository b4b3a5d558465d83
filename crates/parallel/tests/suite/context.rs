//! Attention over sequences that are cut across ranks is attention over whole sequences.

use half::bf16;
use lockstep_comm::{Cause, Error, Options, on_threads, on_threads_with};
use lockstep_kernels::{Attention, Device, Dtype, Float, Tag, Tensor};
use lockstep_parallel::context::{AttentionShard, Context, Heads, Sent, sent};
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

/// Of the whole sequences, sequence by sequence.
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
            Attention::square(self.batch, self.seq, self.heads, self.kv_heads, self.head_dim);
        let qkv = tensor::<E>(&device, tokens, &self.qkv());
        let dout = tensor::<E>(&device, tokens, &self.dout());
        let mut out = device.empty(tokens, self.width(), E::DTYPE, Tag::Activations);
        let mut lse = device.empty(rows, self.seq, Dtype::F32, Tag::Activations);
        device.attention(&shape, qkv.view(), out.view_mut(), lse.view_mut());
        let mut dqkv = device.empty(tokens, self.columns(), E::DTYPE, Tag::Buffers);
        let (out_view, dqkv_view) = (out.view(), dqkv.view_mut());
        device.attention_backward(&shape, qkv.view(), out_view, dout.view(), lse.view(), dqkv_view);
        Answer { out: values::<E>(&out), dqkv: values::<E>(&dqkv) }
    }

    /// On the ranks of a context, put together again.
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

    /// Of a rank's rows, the rows in whole sequences.
    fn places(&self, cut: Cut, index: usize) -> Vec<usize> {
        let held = runs(cut.kind, self.seq, self.degrees(cut), index);
        let mut places = Vec::new();
        for run in held {
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
        context.backward(device, &self.heads(), saved, out_view, dout.view(), dqkv_view)?;
        Ok(Answer { out: values::<E>(&out), dqkv: values::<E>(&dqkv) })
    }

    /// Every kind of context that fits, of these sizes.
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

/// Numbers in -size..size that are the same in every run.
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
    let narrow: Vec<E> = values.iter().map(|x| E::round_from(*x)).collect();
    device.write(tensor.view_mut(), &narrow);
    tensor
}

fn values<E: Float>(tensor: &Tensor) -> Vec<f32> {
    tensor.view().host::<E>().iter().map(|x| x.as_f32()).collect()
}

/// How far the columns of two matrices are apart, as a part of the largest number in them.
fn apart(ours: &[f32], theirs: &[f32], stride: usize, columns: std::ops::Range<usize>) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let of = |x: &[f32]| -> Vec<f32> {
        x.chunks(stride).flat_map(|row| row[columns.clone()].to_vec()).collect()
    };
    let (ours, theirs) = (of(ours), of(theirs));
    let size = theirs.iter().fold(0f32, |a, x| a.max(x.abs()));
    let worst = |a: f32, (x, y): (&f32, &f32)| {
        let apart = (x - y).abs() / size;
        if apart.is_nan() { f32::NAN } else { a.max(apart) }
    };
    ours.iter().zip(&theirs).fold(0.0, worst)
}

fn near(problem: &Problem, cut: Cut, ours: &Answer, whole: &Answer, tolerance: f32) {
    let (width, columns) = (problem.width(), problem.columns());
    let kv = problem.kv_heads * problem.head_dim;
    let [dq, dk, dv] = [0..width, width..width + kv, width + kv..columns]
        .map(|part| apart(&ours.dqkv, &whole.dqkv, columns, part));
    let out = apart(&ours.out, &whole.out, width, 0..width);
    for (name, apart) in [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)] {
        assert!(apart <= tolerance, "{name} {apart:.1e} apart: {cut:?} of {problem:?}");
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
    // Not for all: a ring of three and pairs of neighbours, an odd number of neighbours.
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
            near(&problem, cut, &ours, &whole, tolerance);
            if cut.ranks == 1 {
                assert!(ours == whole, "one rank is the identity, to the bit");
            }
            seen.push((cut.ranks, problem.degrees(cut)));
        }
    }
    for wanted in
        [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 6), (6, 1), (2, 3), (3, 2)]
    {
        assert!(seen.iter().any(|(_, degrees)| *degrees == wanted), "{wanted:?} was never tried");
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
fn the_same_bits_every_time_and_on_any_number_of_threads() {
    let problem = Problem { batch: 2, seq: 144, heads: 6, kv_heads: 2, head_dim: 16 };
    for cut in problem.cuts() {
        let (wide, narrow) = (problem.sharded::<f32>(cut, 1), problem.sharded::<bf16>(cut, 1));
        for threads in [1, 1, 2] {
            assert!(problem.sharded::<f32>(cut, threads) == wide, "{cut:?} f32, {threads} threads");
            let again = problem.sharded::<bf16>(cut, threads);
            assert!(again == narrow, "{cut:?} bf16, {threads} threads");
        }
    }
}

#[test]
fn what_is_sent_is_what_the_formulas_say() {
    sent_as_said::<f32>();
    sent_as_said::<bf16>();
}

fn sent_as_said<E: Float>() {
    // In place nothing would be counted.
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
                let turn = counted();
                let (out, dqkv) = (out.view(), dqkv.view_mut());
                context.backward(&device, &heads, saved, out, dout.view(), dqkv).unwrap();
                let really = Sent { forward: turn - start, backward: counted() - turn };
                let Heads { heads, kv_heads, head_dim, .. } = heads;
                let bytes = E::DTYPE.bytes();
                let brought = AttentionShard { tokens, heads, kv_heads, head_dim, bytes };
                assert_eq!(really, sent(degrees, &brought), "{cut:?} of {problem:?}");
            });
        }
    }
}

/// Nothing but the log-sum-exp is taken, whose bytes are those of a model without a context.
#[test]
fn one_rank_alone_takes_no_memory_of_its_own() {
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
    context.backward(&device, &heads, saved, out, dout.view(), dqkv).unwrap();
    let lse = tokens * problem.heads * 4;
    assert_eq!(device.memory().total.peak, before.total.now + lse);
}

/// What a pass takes for itself it gives back, whatever the kind.
#[test]
fn buffers_are_given_back() {
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

/// On all others, as everybody's output waits for something of everybody.
#[test]
fn a_peer_that_fails_is_an_error() {
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
                let error = error.unwrap_or_else(|| panic!("rank {rank} of {cut:?} saw nothing"));
                let blame = (error.culprit(), error.cause());
                assert_eq!(blame, (Some(1), Some(cause)), "{cut:?}: {error}");
            }
        }
    }
}

#[test]
fn degrees_and_lengths_that_do_not_fit_are_refused() {
    let complaints = on_threads(4, |world| {
        let refused = |seq, degrees| {
            Context::new(&world, ContextKind::Ring, seq, degrees).err().unwrap().to_string()
        };
        (refused(16, (1, 3)), refused(multiple((1, 4)) + 1, (1, 4)))
    });
    for (rank, (ranks, seq)) in complaints.into_iter().enumerate() {
        assert_eq!(ranks, format!("rank {rank}: 4 ranks are no context of 1 · 3"));
        assert!(seq.contains("seq=9 is no multiple of 8"), "{seq}");
    }
}
