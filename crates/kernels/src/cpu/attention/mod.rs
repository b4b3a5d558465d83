//! Causal attention with grouped keys, tile by tile: no matrix of all queries by all keys is ever in memory.
//! Knows nothing of caches of keys or of context parallelism; both come in through where queries and keys
//! start.

#[cfg(target_arch = "x86_64")]
mod amx;
mod backward;
mod deal;
mod delta;
mod forward;
mod known;
mod merge;
mod pack;
mod product;
mod room;
mod rows;
mod running;
mod softmax;
mod unit;
mod write;

pub use delta::delta;
pub use merge::merge;
pub use rows::{Rows, RowsMut};

use super::{Cpu, Level, Scratch};
use crate::{AttentionShape, Dtype, Float};
use deal::Member;
use rows::Reach;

impl AttentionShape {
    fn check(&self) {
        let AttentionShape { heads, kv_heads, head_dim, k_len, scale, .. } = *self;
        assert!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "kv_heads={kv_heads} does not divide heads={heads}"
        );
        assert!(head_dim > 0, "head_dim is nought");
        assert!(
            k_len < 1 << 24,
            "k_len={k_len}: keys are numbered in f32, which is exact below 2^24"
        );
        assert!(scale.is_finite(), "scale is {scale}");
    }
}

/// What the team's members share in a forward pass.
struct Forward<'a, E, O> {
    shape: &'a AttentionShape,
    q: Reach<E>,
    k: Reach<E>,
    v: Reach<E>,
    out: Reach<O>,
    lse: Reach<f32>,
}

/// What the team's members share in a backward pass.
struct Backward<'a, E, G> {
    shape: &'a AttentionShape,
    q: Reach<E>,
    k: Reach<E>,
    v: Reach<E>,
    delta: Delta<E>,
    dout: Reach<E>,
    lse: Reach<f32>,
    dq: Reach<G>,
    dk: Reach<G>,
    dv: Reach<G>,
    /// Whether gradients are added to what is there.
    add: bool,
}

/// Where a backward pass has D = sum of dout out of each query from.
#[derive(Clone, Copy)]
enum Delta<E> {
    From {
        out: Reach<E>,
    },
    /// (tokens, heads)
    Known(Reach<f32>),
}

/// `out` = softmax(`scale` q kᵀ, of the keys seen) v, and the log-sum-exp of the scores. A query that sees no
/// key gets nought, and a log-sum-exp of -inf. What comes out may be stored wider than what went in, for a
/// `merge` that rounds only once.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn forward<E: Float, O: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    q: Rows<'_, E>,
    k: Rows<'_, E>,
    v: Rows<'_, E>,
    out: &mut [O],   // (batch * q_len, heads * head_dim)
    lse: &mut [f32], // (batch, heads, q_len)
) {
    shape.check();
    let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, .. } = *shape;
    let (queries, keys) = (batch * q_len, batch * k_len);
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let job = Forward {
        shape,
        q: Reach::read(&q, queries, width, "q"),
        k: Reach::read(&k, keys, kv_width, "k"),
        v: Reach::read(&v, keys, kv_width, "v"),
        out: Reach::write(&RowsMut::whole(out, width), queries, width, "out"),
        lse: Reach::write(&RowsMut::whole(lse, queries * heads), 1, queries * heads, "lse"),
    };
    if queries > 0 {
        cpu.team.run(&|number, size| {
            job.share(cpu.level, &cpu.scratch[number], Member { number, size })
        });
    }
}

/// The gradients of q, k and v from that of out; those of k and v summed over the heads of a group. They are
/// overwritten, not added to. `out` and `lse` are the forward pass's; where keys are met in several blocks,
/// those of all blocks together, and then the gradients are this block's share.
///
/// The same bits whatever the number of threads.
///
/// # Panics
/// When a slice is shorter than the shape says.
#[allow(clippy::too_many_arguments)] // three inputs, what came out of them, and a gradient for each
pub fn backward<E: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    q: Rows<'_, E>,
    k: Rows<'_, E>,
    v: Rows<'_, E>,
    out: &[E],   // (batch * q_len, heads * head_dim)
    dout: &[E],  // as out
    lse: &[f32], // (batch, heads, q_len)
    dq: RowsMut<'_, E>,
    dk: RowsMut<'_, E>,
    dv: RowsMut<'_, E>,
) {
    let (queries, width) = (shape.batch * shape.q_len, shape.heads * shape.head_dim);
    let out = Reach::read(&Rows { data: out, offset: 0, stride: width }, queries, width, "out");
    run_backward(cpu, shape, [q, k, v], Delta::From { out }, dout, lse, [dq, dk, dv], false);
}

/// The same where `out` is not at hand, or would be read for every block again: `delta` is all that a backward
/// pass wants of it. Gradients may be stored wider than what they are of, and are added to what is there when
/// `add` says so.
#[allow(clippy::too_many_arguments)] // as above
pub fn backward_block<E: Float, G: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    q: Rows<'_, E>,
    k: Rows<'_, E>,
    v: Rows<'_, E>,
    delta: &[f32], // (batch * q_len, heads), see `delta`
    dout: &[E],    // (batch * q_len, heads * head_dim)
    lse: &[f32],   // (batch, heads, q_len)
    dq: RowsMut<'_, G>,
    dk: RowsMut<'_, G>,
    dv: RowsMut<'_, G>,
    add: bool,
) {
    let (queries, heads) = (shape.batch * shape.q_len, shape.heads);
    let rows = Rows { data: delta, offset: 0, stride: heads };
    let delta = Delta::Known(Reach::read(&rows, queries, heads, "delta"));
    run_backward(cpu, shape, [q, k, v], delta, dout, lse, [dq, dk, dv], add);
}

#[allow(clippy::too_many_arguments)] // as above
fn run_backward<E: Float, G: Float>(
    cpu: &Cpu,
    shape: &AttentionShape,
    [q, k, v]: [Rows<'_, E>; 3],
    delta: Delta<E>,
    dout: &[E],
    lse: &[f32],
    [dq, dk, dv]: [RowsMut<'_, G>; 3],
    add: bool,
) {
    shape.check();
    let AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, .. } = *shape;
    let (queries, keys) = (batch * q_len, batch * k_len);
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let job = Backward {
        shape,
        q: Reach::read(&q, queries, width, "q"),
        k: Reach::read(&k, keys, kv_width, "k"),
        v: Reach::read(&v, keys, kv_width, "v"),
        delta,
        dout: Reach::read(&Rows { data: dout, offset: 0, stride: width }, queries, width, "dout"),
        lse: Reach::read(
            &Rows { data: lse, offset: 0, stride: queries * heads },
            1,
            queries * heads,
            "lse",
        ),
        dq: Reach::write(&dq, queries, width, "dq"),
        dk: Reach::write(&dk, keys, kv_width, "dk"),
        dv: Reach::write(&dv, keys, kv_width, "dv"),
        add,
    };
    cpu.team
        .run(&|number, size| job.share(cpu.level, &cpu.scratch[number], Member { number, size }));
}

impl<E: Float, O: Float> Forward<'_, E, O> {
    fn share(&self, level: Level, scratch: &Scratch, me: Member) {
        #[cfg(target_arch = "x86_64")]
        if level == Level::Amx && E::DTYPE == Dtype::Bf16 {
            // SAFETY: just seen.
            return unsafe { amx::forward::member(self, scratch, me) };
        }
        forward::member(self, level, scratch, me);
    }
}

impl<E: Float, G: Float> Backward<'_, E, G> {
    fn share(&self, level: Level, scratch: &Scratch, me: Member) {
        #[cfg(target_arch = "x86_64")]
        if level == Level::Amx && E::DTYPE == Dtype::Bf16 {
            // SAFETY: just seen.
            return unsafe { amx::backward::member(self, scratch, me) };
        }
        backward::member(self, level, scratch, me);
    }
}
