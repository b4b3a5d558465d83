//! Causal grouped-query attention, tile by tile: the matrix of all scores is never stored. Knows nothing about KV caches
//! or context parallelism; both are expressed by the start positions of queries and keys.

#[cfg(target_arch = "x86_64")]
mod amx;
mod backward;
mod delta;
mod forward;
mod head_group;
mod merge;
mod pack;
mod partition;
mod product;
mod query_stats;
mod rows;
mod scratch_arrays;
mod softmax;
mod softmax_state;
mod store_grads;

pub use delta::delta;
pub use merge::merge;
pub use rows::{Rows, RowsMut};

use super::{Cpu, Level, Scratch};
use crate::{AttentionShape, Dtype, Float};
use partition::Worker;
use rows::RawRows;

impl AttentionShape {
    fn check(&self) {
        let AttentionShape { heads, kv_heads, head_dim, k_len, scale, .. } = *self;
        assert!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "kv_heads={kv_heads} does not divide heads={heads}"
        );
        assert!(head_dim > 0, "head_dim must be positive");
        assert!(
            k_len < 1 << 24,
            "k_len={k_len} is too large: key indices are f32, which is exact below 2^24"
        );
        assert!(scale.is_finite(), "scale={scale} is not finite");
    }
}

/// Operands of a forward pass, shared by all threads.
struct Forward<'a, E, O> {
    shape: &'a AttentionShape,
    q: RawRows<E>,
    k: RawRows<E>,
    v: RawRows<E>,
    out: RawRows<O>,
    lse: RawRows<f32>,
}

/// Operands of a backward pass, shared by all threads.
struct Backward<'a, E, G> {
    shape: &'a AttentionShape,
    q: RawRows<E>,
    k: RawRows<E>,
    v: RawRows<E>,
    delta: Delta<E>,
    dout: RawRows<E>,
    lse: RawRows<f32>,
    dq: RawRows<G>,
    dk: RawRows<G>,
    dv: RawRows<G>,
    /// Add to the stored gradients.
    accumulate: bool,
}

/// Source of D = Σ dout · out of each query.
#[derive(Clone, Copy)]
enum Delta<E> {
    /// Computed from the output.
    Output(RawRows<E>),
    /// (tokens, heads)
    Known(RawRows<f32>),
}

/// Results of the forward pass, and the gradient of its output.
#[derive(Clone, Copy)]
pub struct Saved<'a, E> {
    pub dout: &'a [E],  // (batch * q_len, heads * head_dim)
    pub lse: &'a [f32], // (batch, heads, q_len)
    pub delta: DeltaFrom<'a, E>,
}

/// Source of D = Σ dout · out of each query.
#[derive(Clone, Copy)]
pub enum DeltaFrom<'a, E> {
    /// The output of the forward pass. (batch * q_len, heads * head_dim)
    Output(&'a [E]),
    /// D itself, see `delta`. (batch * q_len, heads)
    Delta(&'a [f32]),
}

/// Gradients of queries, keys and values. They may be f32 for bf16 inputs.
pub struct Gradients<'a, G> {
    pub dq: RowsMut<'a, G>,
    pub dk: RowsMut<'a, G>,
    pub dv: RowsMut<'a, G>,
    /// Add to the gradients instead of overwriting them.
    pub accumulate: bool,
}

/// Computes `out` = softmax(`scale` q kᵀ over the visible keys) v, and the log-sum-exp of the scores. A query without
/// visible keys gets zero, and a log-sum-exp of -inf. `out` may be f32 for bf16 inputs, so that `merge` rounds only once.
///
/// # Panics
/// If a slice is too short for the shape.
pub fn forward<E: Float, O: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    [q, k, v]: [Rows<'_, E>; 3],
    out: &mut [O],   // (batch * q_len, heads * head_dim)
    lse: &mut [f32], // (batch, heads, q_len)
) {
    shape.check();
    let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, .. } = *shape;
    let (queries, keys) = (batch * q_len, batch * k_len);
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let job = Forward {
        shape,
        q: RawRows::new(&q, queries, width, "q"),
        k: RawRows::new(&k, keys, kv_width, "k"),
        v: RawRows::new(&v, keys, kv_width, "v"),
        out: RawRows::new_mut(&RowsMut::whole(out, width), queries, width, "out"),
        lse: RawRows::new_mut(&RowsMut::whole(lse, queries * heads), 1, queries * heads, "lse"),
    };
    if queries > 0 {
        cpu.team.run(&|index, count| {
            job.run_worker(cpu.level, &cpu.scratch[index], Worker { index, count })
        });
    }
}

/// Computes the gradients of q, k and v; those of k and v are summed over the heads of a group. For keys in several
/// blocks, `saved` is that of all blocks together, and the gradients are the contribution of this block. The bits do not
/// depend on the number of threads.
///
/// # Panics
/// If a slice is too short for the shape.
pub fn backward<E: Float, G: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    [q, k, v]: [Rows<'_, E>; 3],
    saved: Saved<'_, E>,
    gradients: Gradients<'_, G>,
) {
    shape.check();
    let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, .. } = *shape;
    let (queries, keys) = (batch * q_len, batch * k_len);
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let job = Backward {
        shape,
        q: RawRows::new(&q, queries, width, "q"),
        k: RawRows::new(&k, keys, kv_width, "k"),
        v: RawRows::new(&v, keys, kv_width, "v"),
        delta: match saved.delta {
            DeltaFrom::Output(out) => {
                Delta::Output(RawRows::new(&Rows::whole(out, width), queries, width, "out"))
            }
            DeltaFrom::Delta(delta) => {
                Delta::Known(RawRows::new(&Rows::whole(delta, heads), queries, heads, "delta"))
            }
        },
        dout: RawRows::new(&Rows::whole(saved.dout, width), queries, width, "dout"),
        lse: RawRows::new(&Rows::whole(saved.lse, queries * heads), 1, queries * heads, "lse"),
        dq: RawRows::new_mut(&gradients.dq, queries, width, "dq"),
        dk: RawRows::new_mut(&gradients.dk, keys, kv_width, "dk"),
        dv: RawRows::new_mut(&gradients.dv, keys, kv_width, "dv"),
        accumulate: gradients.accumulate,
    };
    cpu.team.run(&|index, count| {
        job.run_worker(cpu.level, &cpu.scratch[index], Worker { index, count })
    });
}

impl<E: Float, O: Float> Forward<'_, E, O> {
    fn run_worker(&self, level: Level, scratch: &Scratch, worker: Worker) {
        #[cfg(target_arch = "x86_64")]
        if level == Level::Amx && E::DTYPE == Dtype::Bf16 {
            // SAFETY: just checked.
            return unsafe { amx::forward::run_worker(self, scratch, worker) };
        }
        forward::run_worker(self, level, scratch, worker);
    }
}

impl<E: Float, G: Float> Backward<'_, E, G> {
    fn run_worker(&self, level: Level, scratch: &Scratch, worker: Worker) {
        #[cfg(target_arch = "x86_64")]
        if level == Level::Amx && E::DTYPE == Dtype::Bf16 {
            // SAFETY: just checked.
            return unsafe { amx::backward::run_worker(self, scratch, worker) };
        }
        backward::run_worker(self, level, scratch, worker);
    }
}
