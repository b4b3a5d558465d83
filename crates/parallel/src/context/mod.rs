//! The context axis: every rank holds some positions of every sequence, and attention spans the keys and values of all
//! ranks. Works on rows of queries, keys and values; knows no layers.
//!
//! Rows are *run-major*: for each run of the rank (see [`lockstep_plan::context`]), for each sequence of the
//! micro-batch, its `len` tokens. A run is therefore a range of rows of shape (batch, len) that starts at one position,
//! which is what operations on positions take: see [`Context::rows`] and [`Heads::over`].
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::{Device, Dtype, Tag};
//! use lockstep_parallel::context::{Context, Heads};
//! use lockstep_plan::context::ContextKind;
//!
//! // Two ranks share one sequence of 8. With zero keys, a query's output is the mean of the values it sees.
//! let outputs = on_threads(2, |world| {
//!     let device = Device::cpu(1);
//!     let context = Context::new(&world, ContextKind::Ring, 8, (1, 2)).unwrap();
//!     let heads = Heads { batch: 1, heads: 1, kv_heads: 1, head_dim: 1, scale: 1.0 };
//!     let positions: Vec<usize> =
//!         context.rows(1).flat_map(|(run, _)| run.start..run.start + run.len).collect();
//!     let rows: Vec<f32> = positions.iter().flat_map(|at| [0.0, 0.0, *at as f32]).collect();
//!     let mut qkv = device.empty(4, 3, Dtype::F32, Tag::Activations);
//!     device.write(qkv.view_mut(), &rows);
//!     let mut out = device.empty(4, 1, Dtype::F32, Tag::Activations);
//!     context.forward(&device, &heads, qkv, out.view_mut()).unwrap();
//!     let mut host = [0.0f32; 4];
//!     device.read(out.view(), &mut host);
//!     positions.iter().zip(host).map(|(at, out)| (*at, out)).collect::<Vec<_>>()
//! });
//! for (position, output) in outputs.into_iter().flatten() {
//!     assert!((output - position as f32 / 2.0).abs() < 1e-6);
//! }
//! ```

mod layout;
mod ring;
mod ulysses;

use std::ops::Range;

use lockstep_comm::{Error, Group, Result, Traffic};
use lockstep_kernels::{
    AttentionDelta, AttentionOutput, AttentionShape, Device, Dtype, Tag, Tensor, View, ViewMut,
};
use lockstep_plan::context::{ContextKind, Run, multiple, ring_shard, runs};

pub use lockstep_plan::context::{AttentionShard, Sent, ring_sent, sent, ulysses_sent};

use crate::exposed::Exposed;
use ring::Ring;
use ulysses::{HeadColumns, HeadExchange};

/// A rank's position on the context axis. A context of one rank is plain attention: the same bits, without copies or
/// additional memory.
pub struct Context {
    kind: ContextKind,
    seq: usize,
    runs: Vec<Run>,
    /// None for a context of one rank.
    groups: Option<ContextGroups>,
    pub(crate) exposed: Exposed,
}

struct ContextGroups {
    /// Adjacent ranks, which exchange heads.
    ulysses: Group,
    /// Ranks with the same index in their Ulysses groups, which pass keys and values around.
    ring: Group,
}

/// Shape of the attention on this rank, after the split along the tensor axis.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Heads {
    /// Sequences in the micro-batch.
    pub batch: usize,
    pub heads: usize,
    /// A divisor of `heads`: each key head serves `heads / kv_heads` consecutive query heads.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor of the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// Tensors that the backward pass needs besides the output.
pub struct SavedQkv {
    /// The tokens and heads that this rank attended with: its own, or those of its Ulysses group.
    pub qkv: Tensor, // (tokens, (heads + 2 kv_heads) * head_dim)
    /// Log-sum-exp, run by run.
    pub lse: Tensor, // (batch, heads, len), f32
}

/// Arguments of [`Context::backward`].
pub struct AttentionBackward<'a> {
    pub saved: SavedQkv,
    /// The output of `forward`.
    pub out: View<'a>, // (tokens, heads * head_dim)
    pub dout: View<'a>,    // as out
    pub dqkv: ViewMut<'a>, // (tokens, (heads + 2 kv_heads) * head_dim)
}

impl Heads {
    /// Attention of a run to itself; also describes the run's positions to `Device::rope`.
    pub fn over(&self, run: Run) -> AttentionShape {
        self.cross(run, run)
    }

    /// Attention of one run to another.
    fn cross(&self, queries: Run, keys: Run) -> AttentionShape {
        AttentionShape {
            batch: self.batch,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            q_len: queries.len,
            k_len: keys.len,
            q_start: queries.start,
            k_start: keys.start,
            scale: self.scale,
        }
    }

    /// Columns of queries, and of keys or values.
    fn widths(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }
}

impl Context {
    /// A context of one rank, which holds whole sequences.
    pub fn alone(seq: usize) -> Context {
        let runs = vec![Run { start: 0, len: seq }];
        Context { kind: ContextKind::Ring, seq, runs, groups: None, exposed: Exposed::default() }
    }

    /// Splits sequences of `seq` tokens with the degrees (ulysses, ring) of [`lockstep_plan::context::degrees`]. All
    /// ranks of the group call it. Rank `index` of the group has the index `index % ulysses` in its Ulysses group.
    pub fn new(
        group: &Group,
        kind: ContextKind,
        seq: usize,
        degrees: (usize, usize),
    ) -> Result<Context> {
        let (index, (ulysses, ring)) = (group.rank(), degrees);
        let wrong = |what| Err(Error::Misuse { rank: group.members()[index], what });
        if ulysses * ring != group.size() {
            let ranks = group.size();
            return wrong(format!(
                "a group of {ranks} ranks cannot be split into ulysses={ulysses} × ring={ring}"
            ));
        }
        let step = multiple(degrees);
        if !seq.is_multiple_of(step) {
            return wrong(format!(
                "seq={seq} is not a multiple of {step}, as ulysses={ulysses} × ring={ring} requires"
            ));
        }
        if group.size() == 1 {
            return Ok(Context { kind, ..Context::alone(seq) });
        }
        let part = |size: usize, color: usize, name: &str| match size == group.size() {
            true => Ok(group.clone()),
            false => Ok(group.split(Some(color as i64), 0, name)?.expect("the rank has a color")),
        };
        let groups = ContextGroups {
            ulysses: part(ulysses, index / ulysses, "ulysses")?,
            ring: part(ring, index % ulysses, "ring")?,
        };
        let runs = runs(kind, seq, degrees, index);
        Ok(Context { kind, seq, runs, groups: Some(groups), exposed: Exposed::new(group.tracer()) })
    }

    pub fn kind(&self) -> ContextKind {
        self.kind
    }

    /// Length of whole sequences.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// (ulysses, ring)
    pub fn degrees(&self) -> (usize, usize) {
        self.groups.as_ref().map_or((1, 1), ContextGroups::degrees)
    }

    /// The positions of every sequence that this rank holds, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Each run, and its range of this rank's rows.
    pub fn rows(&self, batch: usize) -> impl Iterator<Item = (Run, Range<usize>)> + use<'_> {
        layout::rows(&self.runs, batch)
    }

    /// The groups that exchange heads, keys and values.
    pub(crate) fn subgroups(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().flat_map(|groups| [&groups.ulysses, &groups.ring])
    }

    /// The group around which keys and values travel.
    pub(crate) fn ring_group(&self) -> Option<&Group> {
        self.groups.as_ref().map(|groups| &groups.ring)
    }

    /// Messages and bytes that this rank has sent in the groups of the context.
    pub fn traffic(&self) -> Traffic {
        let all = self.groups.as_ref().map(|g| g.ulysses.traffic() + g.ring.traffic());
        all.unwrap_or_default()
    }

    fn ring<'a>(
        &'a self,
        groups: &'a ContextGroups,
        device: &'a Device,
        heads: &Heads,
    ) -> Ring<'a> {
        let (group, exposed) = (&groups.ring, &self.exposed);
        Ring { group, device, heads: *heads, seq: self.seq, exposed }
    }

    /// Causal attention of this rank's queries over whole sequences. Queries and keys are already rotated. Bytes:
    /// [`sent`].
    pub fn forward(
        &self,
        device: &Device,
        heads: &Heads,
        qkv: Tensor,      // (tokens, (heads + 2 kv_heads) * head_dim)
        out: ViewMut<'_>, // (tokens, heads * head_dim)
    ) -> Result<SavedQkv> {
        let Some(groups) = &self.groups else {
            let lse = attend(device, heads, &qkv, out);
            return Ok(SavedQkv { qkv, lse });
        };
        self.check(heads, qkv.rows());
        let ring = self.ring(groups, device, heads);
        if groups.ulysses.size() == 1 {
            let lse = ring.forward(qkv.view(), out)?;
            return Ok(SavedQkv { qkv, lse });
        }
        let exchange = self.head_exchange(groups, device, heads);
        let packed = exchange.pack(qkv.view(), &HeadColumns::qkv(heads));
        drop(qkv);
        let qkv = exchange.to_heads(packed, Tag::Activations)?;
        let local = exchange.local_heads();
        let (width, _) = local.widths();
        let mut attended = device.empty(qkv.rows(), width, qkv.dtype(), Tag::Buffers);
        let lse = match groups.ring.size() {
            1 => attend(device, &local, &qkv, attended.view_mut()),
            _ => Ring { heads: local, ..ring }.forward(qkv.view(), attended.view_mut())?,
        };
        exchange.to_tokens(attended, &HeadColumns::out(heads), out)?;
        Ok(SavedQkv { qkv, lse })
    }

    /// Computes the gradient of queries, keys and values from that of the output.
    pub fn backward(
        &self,
        device: &Device,
        heads: &Heads,
        backward: AttentionBackward<'_>,
    ) -> Result<()> {
        let AttentionBackward { saved, out, dout, dqkv } = backward;
        let SavedQkv { qkv, lse } = saved;
        let Some(groups) = &self.groups else {
            let shape = heads.over(Run { start: 0, len: qkv.rows() / heads.batch });
            let output = AttentionOutput { out, lse: lse.view(), dout };
            device.attention_backward(&shape, qkv.view(), output, dqkv);
            return Ok(());
        };
        self.check(heads, out.rows());
        // The pass needs only one number per head and token of the output, so the output itself is not exchanged.
        let mut delta = device.empty(out.rows(), heads.heads, Dtype::F32, Tag::Buffers);
        device.attention_delta(out, dout, delta.view_mut());
        let ring = self.ring(groups, device, heads);
        if groups.ulysses.size() == 1 {
            let known = AttentionDelta { dout, lse: lse.view(), delta: delta.view() };
            return ring.backward(qkv.view(), known, dqkv);
        }
        let exchange = self.head_exchange(groups, device, heads);
        let to_heads = |x: View<'_>, columns: &[HeadColumns]| {
            exchange.to_heads(exchange.pack(x, columns), Tag::Buffers)
        };
        let delta = to_heads(delta.view(), &HeadColumns::delta(heads))?;
        let dout = to_heads(dout, &HeadColumns::out(heads))?;
        let mut gradient = device.empty(qkv.rows(), qkv.cols(), qkv.dtype(), Tag::Buffers);
        let known = AttentionDelta { dout: dout.view(), lse: lse.view(), delta: delta.view() };
        let (local, to) = (exchange.local_heads(), gradient.view_mut());
        match groups.ring.size() {
            1 => {
                let shape = local.over(Run { start: 0, len: self.seq });
                device.attention_backward_delta(&shape, qkv.view(), known, to);
            }
            _ => Ring { heads: local, ..ring }.backward(qkv.view(), known, to)?,
        }
        drop((qkv, lse, delta, dout));
        exchange.to_tokens(gradient, &HeadColumns::qkv(heads), dqkv)
    }

    fn head_exchange<'a>(
        &'a self,
        groups: &'a ContextGroups,
        device: &'a Device,
        heads: &Heads,
    ) -> HeadExchange<'a> {
        let (degrees, rank) = (groups.degrees(), groups.ring.rank());
        let indices = rank * degrees.0..(rank + 1) * degrees.0;
        let parts: Vec<Vec<Run>> =
            indices.map(|index| runs(self.kind, self.seq, degrees, index)).collect();
        let spans = layout::spans(&parts, &ring_shard(self.seq, degrees.1, rank), heads.batch);
        let (group, exposed) = (&groups.ulysses, &self.exposed);
        HeadExchange { group, device, heads: *heads, spans, exposed }
    }

    fn check(&self, heads: &Heads, rows: usize) {
        let tokens: usize = self.runs.iter().map(|run| run.len).sum();
        let batch = heads.batch;
        assert_eq!(rows, batch * tokens, "{batch} sequences with {tokens} tokens on this rank");
    }
}

impl ContextGroups {
    fn degrees(&self) -> (usize, usize) {
        (self.ulysses.size(), self.ring.size())
    }
}

/// Attention over whole local sequences. Returns the log-sum-exp.
fn attend(device: &Device, heads: &Heads, qkv: &Tensor, out: ViewMut<'_>) -> Tensor {
    let len = qkv.rows() / heads.batch;
    let mut lse = device.empty(heads.batch * heads.heads, len, Dtype::F32, Tag::Activations);
    let shape = heads.over(Run { start: 0, len });
    device.attention(&shape, qkv.view(), out, lse.view_mut());
    lse
}
