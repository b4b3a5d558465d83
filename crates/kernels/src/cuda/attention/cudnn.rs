//! Attention on cuDNN: bf16, whole causal sequences, or blocks of keys that all queries see.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use lockstep_cuda::Result;

use super::graphs::{self, Pass, Problem};
use super::{ATTENTION, Backward, DeltaFrom, Forward, Rows, warp_each};
use crate::cuda::dnn::{Dnn, Graph, Plan, Target};
use crate::cuda::queue::{Operation, SharedPlan};
use crate::cuda::{Arg, Cuda, Grid};
use crate::{AttentionShape, Dtype, View};

/// Shorter sequences are not worth a plan, which takes up to a second to build.
const MIN_LEN: usize = 128;

/// A deterministic backward pass stores the gradients of all scores. Beyond this size, heads and sequences are
/// computed one group after the other.
const MAX_SCORE_BYTES: usize = 640 << 20;

/// Scores of one group that are too large to be stored at all.
const TOO_MANY_SCORE_BYTES: usize = 4 << 30;

/// Up to this version, backward passes are wrong unless the number of keys is a multiple of 128.
const LAST_WITHOUT_ODD_LENGTHS: usize = 9_15_00;

/// From this major compute capability on, cuDNN's deterministic backward needs engines that the heuristics do not
/// propose.
const FIRST_WITHOUT_DETERMINISM: i32 = 10;

/// How attention uses cuDNN, and the plans built so far; `None` for graphs that cuDNN refused.
pub(crate) struct Settings {
    plans: Mutex<HashMap<Problem, Option<Arc<Plan>>>>,
    deterministic: AtomicBool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { plans: Mutex::default(), deterministic: AtomicBool::new(true) }
    }
}

impl Cuda {
    /// Whether attention gradients must have the same bits in every run.
    pub(crate) fn set_deterministic_attention(&self, deterministic: bool) {
        if let Some(dnn) = &self.dnn {
            dnn.attention.deterministic.store(deterministic, Ordering::Relaxed);
        }
    }
}

/// Enqueues a forward pass, or returns false if cuDNN does not take it.
pub(super) fn forward(cuda: &Cuda, pass: &Forward<'_>) -> bool {
    let is_f32 = pass.out.dtype() == Dtype::F32;
    if pass.one_off || ![pass.out.address(), pass.lse.address()].iter().all(is_aligned) {
        return false;
    }
    let Some(dnn) = usable(cuda, pass.dtype, &pass.qkv) else { return false };
    let Some(problem) = forward_problem(pass.shape, strides(&pass.qkv)) else { return false };
    let Some(plan) = plan(dnn, &problem) else { return false };

    // cuDNN writes bf16 only.
    let mut layout = Layout::default();
    let workspace = layout.add(plan.workspace);
    let rounded = layout.add(if is_f32 { pass.out.len() * 2 } else { 0 });
    let scratch = cuda.scratch(layout.bytes);
    let out = if is_f32 { scratch.address() + rounded } else { pass.out.address() };
    let [q, k, v] = pass.qkv.map(|rows| rows.address);
    let tensors = [
        (graphs::Q, q),
        (graphs::K, k),
        (graphs::V, v),
        (graphs::OUT, out),
        (graphs::LSE, pass.lse.address()),
    ];
    execute(cuda, &plan, &tensors, scratch.address() + workspace);
    if is_f32 {
        let (rows, width) =
            (pass.shape.batch * pass.shape.q_len, pass.shape.heads * pass.shape.head_dim);
        let to = Rows { address: pass.out.address(), stride: width };
        add(cuda, out, to, (rows, width), false);
    }
    true
}

/// Enqueues a backward pass, or returns false if cuDNN does not take it.
pub(super) fn backward(cuda: &Cuda, pass: &Backward<'_>) -> bool {
    let shape = pass.shape;
    let Some(dnn) = usable(cuda, pass.dtype, &pass.qkv) else { return false };
    let deterministic = dnn.attention.deterministic.load(Ordering::Relaxed);
    let direct = pass.gradient_dtype == Dtype::Bf16 && !pass.accumulate;
    let output = match pass.delta {
        DeltaFrom::Output(out) => out.address(),
        DeltaFrom::Delta(_) => 0,
    };
    if ![output, pass.dout.address(), pass.lse.address()].iter().all(is_aligned)
        || direct && !aligned(&pass.gradients)
    {
        return false;
    }
    let installed = Installed { capability: cuda.context.capability.0, version: dnn.version() };
    let gradient_strides = direct.then(|| strides(&pass.gradients));
    let problem =
        backward_problem(shape, strides(&pass.qkv), gradient_strides, deterministic, installed);
    let Some((group, problem)) = problem else { return false };
    let Some(plan) = plan(dnn, &problem) else { return false };

    // cuDNN writes bf16 only, and needs the output rather than delta.
    let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, .. } = *shape;
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let (queries, keys) = (batch * q_len, batch * k_len);
    let size = |rows: usize, width: usize| if direct { 0 } else { rows * width * 2 };
    let mut layout = Layout::default();
    let buffers = [(queries, width), (keys, kv_width), (keys, kv_width)]
        .map(|(rows, width)| (layout.add(size(rows, width)), width));
    let stand_in = match pass.delta {
        DeltaFrom::Output(_) => 0,
        DeltaFrom::Delta(_) => layout.add(queries * width * 2),
    };

    let rows = group.batch * group.kv_heads * shape.group() * q_len;
    let delta = layout.add(rows * size_of::<f32>());
    let dq_sums = layout.add(if deterministic { 0 } else { rows * head_dim * size_of::<f32>() });
    let workspace = layout.add(plan.workspace);
    let scratch = cuda.scratch(layout.bytes);
    let base = scratch.address();

    let out = match pass.delta {
        DeltaFrom::Output(out) => out.address(),
        DeltaFrom::Delta(delta) => {
            make_stand_in(cuda, pass.dout, delta, base + stand_in, head_dim);
            base + stand_in
        }
    };
    let gradients = match direct {
        true => pass.gradients,
        false => buffers.map(|(offset, stride)| Rows { address: base + offset, stride }),
    };
    for (first_batch, first_head) in group.starts(shape) {
        let first_query_head = first_head * shape.group();
        let token =
            |rows: Rows, len, head| rows.at(first_batch * len, head * head_dim, Dtype::Bf16);
        let output = |address| token(Rows { address, stride: width }, q_len, first_query_head);
        let ([q, k, v], [dq, dk, dv]) = (pass.qkv, gradients);
        let lse = ((first_batch * heads + first_query_head) * q_len * size_of::<f32>()) as u64;
        let mut tensors = vec![
            (graphs::Q, token(q, q_len, first_query_head)),
            (graphs::K, token(k, k_len, first_head)),
            (graphs::V, token(v, k_len, first_head)),
            (graphs::OUT, output(out)),
            (graphs::DOUT, output(pass.dout.address())),
            (graphs::LSE, pass.lse.address() + lse),
            (graphs::DQ, token(dq, q_len, first_query_head)),
            (graphs::DK, token(dk, k_len, first_head)),
            (graphs::DV, token(dv, k_len, first_head)),
            (graphs::DELTA, base + delta),
        ];
        if !deterministic {
            tensors.push((graphs::DQ_SUMS, base + dq_sums));
        }
        execute(cuda, &plan, &tensors, base + workspace);
    }
    if !direct {
        let sizes = [(queries, width), (keys, kv_width), (keys, kv_width)];
        for ((from, to), size) in gradients.iter().zip(pass.gradients).zip(sizes) {
            add(cuda, from.address, to, size, pass.accumulate);
        }
    }
    true
}

/// The library, if it is installed and takes such inputs.
fn usable<'a>(cuda: &'a Cuda, dtype: Dtype, qkv: &[Rows; 3]) -> Option<&'a Dnn> {
    cuda.dnn.as_ref().filter(|_| dtype == Dtype::Bf16 && aligned(qkv))
}

/// The problem of a forward pass, if cuDNN takes its shape. `strides` are those of q, k and v.
pub(super) fn forward_problem(shape: &AttentionShape, strides: [i64; 3]) -> Option<Problem> {
    Some(Problem::new(shape, mask(shape)?, strides, Pass::Forward))
}

/// The GPU and the cuDNN that compute a backward pass.
#[derive(Clone, Copy)]
pub(super) struct Installed {
    /// Major compute capability of the GPU.
    pub capability: i32,
    /// Version of cuDNN.
    pub version: usize,
}

/// The problem of one execution of a backward pass, if cuDNN takes its shape. Without `gradient_strides`, the gradients
/// are contiguous.
pub(super) fn backward_problem(
    shape: &AttentionShape,
    strides: [i64; 3],
    gradient_strides: Option<[i64; 3]>,
    deterministic: bool,
    installed: Installed,
) -> Option<(Group, Problem)> {
    let causal = mask(shape)?;
    if deterministic && installed.capability >= FIRST_WITHOUT_DETERMINISM
        || installed.version <= LAST_WITHOUT_ODD_LENGTHS && !shape.k_len.is_multiple_of(128)
    {
        return None;
    }
    let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
    let contiguous = [heads, kv_heads, kv_heads].map(|heads| (heads * head_dim) as i64);
    let to = Pass::Backward { strides: gradient_strides.unwrap_or(contiguous), deterministic };
    let group = Group::new(shape, deterministic)?;
    Some((group, group.problem(Problem::new(shape, causal, strides, to))))
}

/// Whether there is a mask, if cuDNN takes such a shape.
fn mask(shape: &AttentionShape) -> Option<bool> {
    let AttentionShape { head_dim, q_len, k_len, .. } = *shape;
    let suits =
        head_dim.is_multiple_of(8) && (32..=256).contains(&head_dim) && q_len.min(k_len) >= MIN_LEN;
    if suits { is_causal(shape) } else { None }
}

/// True for whole sequences, false if all queries see all keys, and none for anything between.
pub(super) fn is_causal(shape: &AttentionShape) -> Option<bool> {
    let AttentionShape { q_len, k_len, q_start, k_start, .. } = *shape;
    if k_start + k_len <= q_start + 1 {
        return Some(false);
    }
    (q_start == k_start && q_len == k_len).then_some(true)
}

/// The plan of a graph, built when it is first needed.
fn plan(dnn: &Dnn, problem: &Problem) -> Option<Arc<Plan>> {
    let mut plans = dnn.attention.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let build = || dnn.with_handle(|target| build(problem, dnn.graph(), target));
    let kept = plans.entry(*problem).or_insert_with(|| match build() {
        Ok(plan) => Some(Arc::new(plan)),
        Err(error) => {
            eprintln!(
                "warning: attention runs without cuDNN, which is slower: {error} ({problem:?})"
            );
            None
        }
    });
    kept.clone()
}

/// Builds the plan of a problem, from an empty graph.
pub(super) fn build(problem: &Problem, mut graph: Graph, target: Target<'_>) -> Result<Plan> {
    problem.write(&mut graph)?;
    Plan::build(graph, target, problem.deterministic())
}

fn execute(cuda: &Cuda, plan: &Arc<Plan>, tensors: &[(i64, u64)], workspace: u64) {
    let args = tensors.iter().flat_map(|(id, address)| [Arg::from(*id), Arg::from(*address)]);
    let plan = SharedPlan(plan.clone());
    cuda.queue.push(cuda.libraries(), args, |tensors| Operation::Attention {
        plan,
        tensors,
        workspace,
    });
}

/// Writes an output with Σ dout · out = delta.
fn make_stand_in(cuda: &Cuda, dout: View<'_>, delta: View<'_>, out: u64, head_dim: usize) {
    let count = delta.len();
    let args =
        [dout.into(), delta.into(), out.into(), (count as i64).into(), (head_dim as i32).into()];
    cuda.launch(&ATTENTION, "attention_stand_in_bf16", warp_each(count), &args);
}

/// Adds contiguous bf16 rows to the first columns of f32 rows, or overwrites them.
fn add(cuda: &Cuda, from: u64, to: Rows, (rows, width): (usize, usize), accumulate: bool) {
    let args = [
        from.into(),
        to.address.into(),
        (to.stride as i64).into(),
        (width as i32).into(),
        i32::from(accumulate).into(),
    ];
    cuda.launch(&ATTENTION, "attention_add_bf16", Grid::new(rows, 256), &args);
}

fn strides(rows: &[Rows; 3]) -> [i64; 3] {
    rows.map(|rows| rows.stride as i64)
}

/// Graphs declare that all tensors start at a multiple of 16 bytes.
fn is_aligned(address: &u64) -> bool {
    address.is_multiple_of(16)
}

fn aligned(rows: &[Rows; 3]) -> bool {
    rows.iter().all(|rows| is_aligned(&rows.address) && rows.stride.is_multiple_of(8))
}

/// Sequences and key heads that one execution of a backward plan computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Group {
    pub batch: usize,
    pub kv_heads: usize,
}

impl Group {
    /// Everything at once, or as much as a deterministic pass can hold. None if that is less than one key head, or if
    /// the rows of the log-sum-exp are too odd to start in the middle.
    pub fn new(shape: &AttentionShape, deterministic: bool) -> Option<Group> {
        let AttentionShape { batch, kv_heads, q_len, k_len, .. } = *shape;
        if !deterministic {
            return Some(Group { batch, kv_heads });
        }
        let scores = q_len.next_multiple_of(64) * k_len.next_multiple_of(64);
        let head_bytes = shape.group() * scores * 2;
        if head_bytes > TOO_MANY_SCORE_BYTES {
            return None;
        }
        let fit = (MAX_SCORE_BYTES / head_bytes).max(1);
        let group = match fit / kv_heads {
            0 => Group { batch: 1, kv_heads: largest_divisor(kv_heads, fit) },
            sequences => Group { batch: largest_divisor(batch, sequences), kv_heads },
        };
        let whole = Group { batch, kv_heads };
        (group == whole || q_len.is_multiple_of(4)).then_some(group)
    }

    /// The problem of one execution.
    fn problem(&self, whole: Problem) -> Problem {
        let heads = whole.heads / whole.kv_heads * self.kv_heads as i64;
        Problem { batch: self.batch as i64, heads, kv_heads: self.kv_heads as i64, ..whole }
    }

    /// First sequence and first key head of each execution.
    fn starts(&self, shape: &AttentionShape) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (kv_heads, by) = (shape.kv_heads, self.kv_heads);
        let batches = (0..shape.batch).step_by(self.batch);
        batches.flat_map(move |batch| (0..kv_heads).step_by(by).map(move |head| (batch, head)))
    }
}

fn largest_divisor(number: usize, at_most: usize) -> usize {
    (1..=number.min(at_most)).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}

/// Offsets of buffers in scratch memory.
#[derive(Default)]
struct Layout {
    bytes: usize,
}

impl Layout {
    fn add(&mut self, bytes: usize) -> u64 {
        let offset = self.bytes;
        self.bytes = (offset + bytes).next_multiple_of(256);
        offset as u64
    }
}
