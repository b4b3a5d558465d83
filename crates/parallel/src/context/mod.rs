//! The context axis: every rank holds some positions of every sequence, and attention reaches the keys and
//! values that other ranks hold. Acts on rows of queries, keys and values; knows no layers.
//!
//! Rows are *run-major*: for each run of the rank (see [`lockstep_plan::context`]), for each sequence of the
//! micro-batch, its `len` tokens. So a run is a range of rows that looks like (batch, len) from one position on,
//! and all that takes positions takes it as it lies: [`Context::rows`] and [`Heads::over`] say where.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::{Device, Dtype, Tag};
//! use lockstep_parallel::context::{Context, Heads};
//! use lockstep_plan::context::ContextKind;
//!
//! // Two ranks share one sequence of 8; with keys of zeros, a query's output is the mean of the values it sees.
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

mod held;
mod ring;
mod ulysses;
mod wire;

use std::ops::Range;
use std::time::Duration;

use lockstep_comm::{Error, Group, Result, Traffic};
use lockstep_kernels::{Attention, AttentionKnown, Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::context::{ContextKind, Run, multiple, ring_shard, runs};

pub use lockstep_plan::context::{AttentionShard, Sent, ring_sent, sent, ulysses_sent};

use crate::exposed::Exposed;
use ring::Ring;
use ulysses::{Block, Deal};

/// A rank's place on the context axis. One rank alone is the identity: it attends as if there were no context,
/// to the bit, without a copy and in no other memory.
pub struct Context {
    kind: ContextKind,
    seq: usize,
    runs: Vec<Run>,
    /// None for a rank alone.
    others: Option<Others>,
    exposed: Exposed,
}

/// Those with whom a rank shares its sequences.
struct Others {
    /// Neighbours, among whom heads are dealt out.
    ulysses: Group,
    /// Ranks of one place in their neighbourhoods, round which keys and values travel.
    ring: Group,
}

/// What attention is made of, on this rank: the tensor axis has already cut it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Heads {
    /// Sequences in the micro-batch.
    pub batch: usize,
    pub heads: usize,
    /// A divisor of `heads`: as many of them in a row share a key head.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// What scores are multiplied with, usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// What the backward pass needs beside the output.
pub struct Saved {
    /// Of the tokens and heads that this rank attended with: its own, or what its neighbours dealt to it.
    pub qkv: Tensor, // (tokens, (heads + 2 kv_heads) * head_dim)
    /// Run by run.
    pub lse: Tensor, // (batch, heads, len), f32
}

impl Heads {
    /// The rows of a run that look at themselves: what `Device::rope` wants to know of them.
    pub fn over(&self, run: Run) -> Attention {
        self.meeting(run, run)
    }

    /// The rows of a run that look at those of another.
    fn meeting(&self, queries: Run, keys: Run) -> Attention {
        Attention {
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
    /// One rank that holds whole sequences.
    pub fn alone(seq: usize) -> Context {
        let runs = vec![Run { start: 0, len: seq }];
        Context { kind: ContextKind::Ring, seq, runs, others: None, exposed: Exposed::default() }
    }

    /// All ranks of the group call it, with the degrees (ulysses, ring) of [`lockstep_plan::context::degrees`].
    /// The rank at `index` of the group is at `index % ulysses` among its neighbours.
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
            return wrong(format!("{ranks} ranks are no context of {ulysses} · {ring}"));
        }
        let step = multiple(degrees);
        if !seq.is_multiple_of(step) {
            let what = format!("seq={seq} is no multiple of {step}, which a context of");
            return wrong(format!("{what} {ulysses} · {ring} cuts it by"));
        }
        if group.size() == 1 {
            return Ok(Context { kind, ..Context::alone(seq) });
        }
        let part = |size: usize, colour: usize, name: &str| match size == group.size() {
            true => Ok(group.clone()),
            false => Ok(group.split(Some(colour as i64), 0, name)?.expect("we gave a colour")),
        };
        let others = Others {
            ulysses: part(ulysses, index / ulysses, "ulysses")?,
            ring: part(ring, index % ulysses, "ring")?,
        };
        let runs = runs(kind, seq, degrees, index);
        Ok(Context { kind, seq, runs, others: Some(others), exposed: Exposed::default() })
    }

    pub fn kind(&self) -> ContextKind {
        self.kind
    }

    /// Of whole sequences.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// (ulysses, ring)
    pub fn degrees(&self) -> (usize, usize) {
        self.others.as_ref().map_or((1, 1), Others::degrees)
    }

    /// The positions of every sequence that this rank holds, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Each run, and its rows among this rank's.
    pub fn rows(&self, batch: usize) -> impl Iterator<Item = (Run, Range<usize>)> + use<'_> {
        held::rows(&self.runs, batch)
    }

    /// What this rank has sent so far in the groups of its context.
    pub fn traffic(&self) -> Traffic {
        let all = self.others.as_ref().map(|o| o.ulysses.traffic() + o.ring.traffic());
        all.unwrap_or_default()
    }

    /// Time spent on waiting for other ranks, since it was last asked.
    pub fn take_exposed(&self) -> Duration {
        self.exposed.take()
    }

    fn ring<'a>(&'a self, others: &'a Others, device: &'a Device, heads: &Heads) -> Ring<'a> {
        let (group, exposed) = (&others.ring, &self.exposed);
        Ring { group, device, heads: *heads, seq: self.seq, exposed }
    }

    /// Causal attention over whole sequences, for the queries of this rank. Queries and keys are rotated
    /// already. What is sent: [`sent`].
    pub fn forward(
        &self,
        device: &Device,
        heads: &Heads,
        qkv: Tensor,      // (tokens, (heads + 2 kv_heads) * head_dim)
        out: ViewMut<'_>, // (tokens, heads * head_dim)
    ) -> Result<Saved> {
        let Some(others) = &self.others else {
            let lse = attend(device, heads, &qkv, out);
            return Ok(Saved { qkv, lse });
        };
        self.check(heads, qkv.rows());
        let ring = self.ring(others, device, heads);
        if others.ulysses.size() == 1 {
            let lse = ring.attend(&qkv, out)?;
            return Ok(Saved { qkv, lse });
        }
        let deal = self.deal(others, device, heads);
        let packed = deal.packed(qkv.view(), &Block::qkv(heads));
        drop(qkv);
        let qkv = deal.to_heads(packed, Tag::Activations)?;
        let dealt = deal.dealt();
        let (width, _) = dealt.widths();
        let mut attended = device.empty(qkv.rows(), width, qkv.dtype(), Tag::Buffers);
        let lse = match others.ring.size() {
            1 => attend(device, &dealt, &qkv, attended.view_mut()),
            _ => Ring { heads: dealt, ..ring }.attend(&qkv, attended.view_mut())?,
        };
        deal.to_tokens(attended, &Block::out(heads), out)?;
        Ok(Saved { qkv, lse })
    }

    /// From the gradient of the output to that of queries, keys and values. `out` is what `forward` gave.
    pub fn backward(
        &self,
        device: &Device,
        heads: &Heads,
        saved: Saved,
        out: View<'_>,     // (tokens, heads * head_dim)
        dout: View<'_>,    // as out
        dqkv: ViewMut<'_>, // (tokens, (heads + 2 kv_heads) * head_dim)
    ) -> Result<()> {
        let Saved { qkv, lse } = saved;
        let Some(others) = &self.others else {
            let shape = heads.over(Run { start: 0, len: qkv.rows() / heads.batch });
            device.attention_backward(&shape, qkv.view(), out, dout, lse.view(), dqkv);
            return Ok(());
        };
        self.check(heads, out.rows());
        // A number per head and token is all that the pass wants of the output, which stays where it is.
        let mut delta = device.empty(out.rows(), heads.heads, Dtype::F32, Tag::Buffers);
        device.attention_delta(out, dout, delta.view_mut());
        let ring = self.ring(others, device, heads);
        if others.ulysses.size() == 1 {
            let known = AttentionKnown { dout, lse: lse.view(), delta: delta.view() };
            return ring.attend_backward(&qkv, known, dqkv);
        }
        let deal = self.deal(others, device, heads);
        let delta = deal.to_heads(deal.packed(delta.view(), &Block::delta(heads)), Tag::Buffers)?;
        let dout = deal.to_heads(deal.packed(dout, &Block::out(heads)), Tag::Buffers)?;
        let mut gradient = device.empty(qkv.rows(), qkv.cols(), qkv.dtype(), Tag::Buffers);
        let known = AttentionKnown { dout: dout.view(), lse: lse.view(), delta: delta.view() };
        let (dealt, to) = (deal.dealt(), gradient.view_mut());
        match others.ring.size() {
            1 => {
                let shape = dealt.over(Run { start: 0, len: self.seq });
                device.attention_backward_known(&shape, qkv.view(), known, to);
            }
            _ => Ring { heads: dealt, ..ring }.attend_backward(&qkv, known, to)?,
        }
        drop((qkv, lse, delta, dout));
        deal.to_tokens(gradient, &Block::qkv(heads), dqkv)
    }

    fn deal<'a>(&'a self, others: &'a Others, device: &'a Device, heads: &Heads) -> Deal<'a> {
        let (degrees, rank) = (others.degrees(), others.ring.rank());
        let neighbours = rank * degrees.0..(rank + 1) * degrees.0;
        let parts: Vec<Vec<Run>> =
            neighbours.map(|index| runs(self.kind, self.seq, degrees, index)).collect();
        let spans = held::spans(&parts, &ring_shard(self.seq, degrees.1, rank), heads.batch);
        let (group, exposed) = (&others.ulysses, &self.exposed);
        Deal { group, device, heads: *heads, spans, exposed }
    }

    fn check(&self, heads: &Heads, rows: usize) {
        let held: usize = self.runs.iter().map(|run| run.len).sum();
        assert_eq!(
            rows,
            heads.batch * held,
            "{} sequences have {held} tokens each on this rank",
            heads.batch
        );
    }
}

impl Others {
    fn degrees(&self) -> (usize, usize) {
        (self.ulysses.size(), self.ring.size())
    }
}

/// Over whole sequences, all of which are here. Gives the log-sum-exp.
fn attend(device: &Device, heads: &Heads, qkv: &Tensor, out: ViewMut<'_>) -> Tensor {
    let len = qkv.rows() / heads.batch;
    let mut lse = device.empty(heads.batch * heads.heads, len, Dtype::F32, Tag::Activations);
    let shape = heads.over(Run { start: 0, len });
    device.attention(&shape, qkv.view(), out, lse.view_mut());
    lse
}
