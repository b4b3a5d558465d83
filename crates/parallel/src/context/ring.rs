//! Ring attention (Liu et al. 2023): every rank keeps its queries, and blocks of keys and values travel from
//! rank to rank. A block goes on its way before the queries here meet it, so that sending hides behind
//! computing. What no query here may see is passed on, and not computed with.
//!
//! Sums over blocks are in f32 and in the order of the ring, whatever arrives when: the same bits every time.

use std::ops::Range;

use half::bf16;
use lockstep_comm::{Group, Pending, Result};
use lockstep_kernels::{Attention, AttentionKnown, Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::context::ring_shard;

use super::Heads;
use super::held;
use super::wire::{Carried, Number};
use crate::exposed::Exposed;

pub(super) struct Ring<'a> {
    pub group: &'a Group,
    pub device: &'a Device,
    pub heads: Heads,
    /// Of whole sequences.
    pub seq: usize,
    pub exposed: &'a Exposed,
}

/// A run of queries of this rank that meets a run of keys, at least one of which it sees.
struct Meeting {
    shape: Attention,
    /// Rows among this rank's tokens.
    queries: Range<usize>,
    /// Rows among the tokens of the keys' owner.
    keys: Range<usize>,
    /// Whether these queries have met no keys before.
    first: bool,
}

/// A block on its way to the next rank, and another coming.
struct Passing<T> {
    sent: Pending<Result<Carried<T>>>,
    coming: Pending<Result<Carried<T>>>,
}

impl<T> Passing<T> {
    fn wait(self) -> Result<Tensor> {
        self.sent.wait()?;
        Ok(self.coming.wait()?.tensor)
    }
}

impl Ring<'_> {
    /// Over what all ranks of the ring hold. Gives the log-sum-exp.
    pub fn attend(&self, qkv: &Tensor, out: ViewMut<'_>) -> Result<Tensor> {
        let Heads { batch, heads, .. } = self.heads;
        let len = qkv.rows() / batch;
        let mut lse = self.device.empty(batch * heads, len, Dtype::F32, Tag::Activations);
        match qkv.dtype() {
            Dtype::Bf16 => self.forward::<bf16>(qkv.view(), out, lse.view_mut())?,
            _ => self.forward::<f32>(qkv.view(), out, lse.view_mut())?,
        }
        Ok(lse)
    }

    /// The gradients of what this rank holds.
    pub fn attend_backward(
        &self,
        qkv: &Tensor,
        known: AttentionKnown<'_>,
        dqkv: ViewMut<'_>,
    ) -> Result<()> {
        match qkv.dtype() {
            Dtype::Bf16 => self.backward::<bf16>(qkv.view(), known, dqkv),
            _ => self.backward::<f32>(qkv.view(), known, dqkv),
        }
    }

    /// r-1 messages of one block each; bytes: [`lockstep_plan::context::ring_sent`].
    fn forward<T: Number>(
        &self,
        qkv: View<'_>,        // (tokens, (heads + 2 kv_heads) * head_dim)
        mut out: ViewMut<'_>, // (tokens, heads * head_dim)
        mut lse: ViewMut<'_>, // (batch, heads, len) run by run, f32
    ) -> Result<()> {
        // What is stored in f32 is summed up where it is to lie.
        let narrow = out.dtype() != Dtype::F32;
        let mut sums = narrow.then(|| self.wide(out.rows(), out.cols()));
        let mut part = self.wide(out.rows(), out.cols());
        let mut part_lse = self.wide(1, lse.len());

        let mut kv = self.packed(qkv);
        for step in 0..self.group.size() {
            let passing = (step + 1 < self.group.size()).then(|| self.pass_on::<T>(&kv));
            for meeting in self.meetings(step) {
                let Meeting { shape, queries, keys, first } = meeting;
                let (q, [k, v]) = (qkv.rows_of(queries.clone()), halves(&kv, &keys));
                let sums = sums.as_mut().map_or_else(|| out.reborrow(), Tensor::view_mut);
                let (sums, of_heads) = (sums.rows_of(queries.clone()), self.of_heads(&queries));
                let lse = lse.reborrow().part(of_heads.clone());
                if first {
                    self.device.attention_over(&shape, q, k, v, sums, lse);
                    continue;
                }
                let to = part.view_mut().rows_of(queries.clone());
                let to_lse = part_lse.view_mut().part(of_heads.clone());
                self.device.attention_over(&shape, q, k, v, to, to_lse);
                let (part, part_lse) =
                    (part.view().rows_of(queries), part_lse.view().part(of_heads));
                self.device.attention_merge(&shape, sums, lse, part, part_lse);
            }
            if let Some(passing) = passing {
                kv = self.exposed.timed(|| passing.wait())?;
            }
        }
        if let Some(sums) = sums {
            self.device.cast(sums.view(), out);
        }
        Ok(())
    }

    /// Keys and values go round once more, and their gradients follow them: begun by the rank after their owner,
    /// added to by each, and home from the last. 2(r-1) messages; bytes: [`lockstep_plan::context::ring_sent`].
    fn backward<T: Number>(
        &self,
        qkv: View<'_>, // (tokens, (heads + 2 kv_heads) * head_dim)
        known: AttentionKnown<'_>,
        mut dqkv: ViewMut<'_>, // as qkv
    ) -> Result<()> {
        let (size, (width, kv_width)) = (self.group.size(), self.heads.widths());
        let mut dq = (dqkv.dtype() != Dtype::F32).then(|| self.noughts(qkv.rows(), width));
        if dq.is_none() {
            self.device.fill(dqkv.reborrow(), 0.0);
        }
        let mut meet = |step: usize, kv: &Tensor, dkv: &mut Tensor| {
            for meeting in self.meetings(step) {
                let dq = dq.as_mut().map_or_else(|| dqkv.reborrow(), Tensor::view_mut);
                self.meet_backward(&meeting, qkv, &known, kv, dq, dkv);
            }
        };

        let mut kv = self.packed(qkv);
        let passing = self.pass_on::<T>(&kv);
        let mut own = self.noughts(kv.rows(), kv.cols());
        meet(0, &kv, &mut own);
        kv = self.exposed.timed(|| passing.wait())?;

        let mut sent: Option<Pending<Result<Carried<f32>>>> = None;
        for step in 1..size {
            // Of one rank's messages the gradients of this step come before the keys of the next.
            let coming = (step > 1).then(|| self.gradients_coming());
            let passing = (step + 1 < size).then(|| self.pass_on::<T>(&kv));
            let mut ours = self.noughts(kv.rows(), kv.cols());
            meet(step, &kv, &mut ours);
            if let Some(coming) = coming {
                self.device.add(ours.view_mut(), self.wait(coming)?.tensor.view());
            }
            if let Some(sent) = sent.take() {
                self.wait(sent)?;
            }
            sent = Some(self.group.start_send::<f32, _>(ours.into(), self.next()));
            if let Some(passing) = passing {
                kv = self.exposed.timed(|| passing.wait())?;
            }
        }
        drop(kv);
        let home = self.wait(self.gradients_coming())?.tensor;
        self.device.add(own.view_mut(), home.view());
        if let Some(sent) = sent {
            self.wait(sent)?;
        }

        if let Some(dq) = dq {
            self.device.place_columns(dq.view(), 0..width, dqkv.reborrow(), 0);
        }
        let [dk, dv] = halves(&own, &(0..qkv.rows()));
        self.device.place_columns(dk, 0..kv_width, dqkv.reborrow(), width);
        self.device.place_columns(dv, 0..kv_width, dqkv, width + kv_width);
        Ok(())
    }

    fn meet_backward(
        &self,
        meeting: &Meeting,
        qkv: View<'_>,
        known: &AttentionKnown<'_>,
        kv: &Tensor,
        dq: ViewMut<'_>,
        dkv: &mut Tensor,
    ) {
        let Meeting { shape, queries, keys, .. } = meeting;
        let (q, [k, v]) = (qkv.rows_of(queries.clone()), halves(kv, keys));
        let known = AttentionKnown {
            dout: known.dout.rows_of(queries.clone()),
            lse: known.lse.part(self.of_heads(queries)),
            delta: known.delta.rows_of(queries.clone()),
        };
        let (tokens, cols) = (dkv.rows() / 2, dkv.cols());
        let (dk, dv) = dkv.view_mut().split_at(tokens * cols);
        let [dk, dv] = [dk, dv].map(|half| half.shaped(tokens, cols).rows_of(keys.clone()));
        let gradients = [dq.rows_of(queries.clone()), dk, dv];
        self.device.attention_backward_over(shape, [q, k, v], known, gradients);
    }

    /// Who meets whom when the keys here are those of the rank `step` before.
    fn meetings(&self, step: usize) -> Vec<Meeting> {
        let (size, me, batch) = (self.group.size(), self.group.rank(), self.heads.batch);
        let ours = ring_shard(self.seq, size, me);
        let theirs = ring_shard(self.seq, size, (me + size - step) % size);
        let mut meetings = Vec::new();
        for (run, queries) in held::rows(&ours, batch) {
            let seen = held::rows(&theirs, batch).filter(|(other, _)| other.start < run.end());
            meetings.extend(seen.enumerate().map(|(number, (other, keys))| Meeting {
                shape: self.heads.meeting(run, other),
                queries: queries.clone(),
                keys,
                // Every query sees keys of its own rank, at the least itself.
                first: step == 0 && number == 0,
            }));
        }
        meetings
    }

    /// The log-sum-exps of rows that are runs.
    fn of_heads(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.heads.heads..rows.end * self.heads.heads
    }

    /// This rank's keys, and below them its values: (2 tokens, kv_heads * head_dim).
    fn packed(&self, qkv: View<'_>) -> Tensor {
        let (tokens, (width, kv_width)) = (qkv.rows(), self.heads.widths());
        let mut kv = self.device.empty(2 * tokens, kv_width, qkv.dtype(), Tag::Buffers);
        self.device.copy_columns(qkv, width, kv.view_mut().rows_of(0..tokens));
        self.device.copy_columns(qkv, width + kv_width, kv.view_mut().rows_of(tokens..2 * tokens));
        kv
    }

    /// Starts sending a block to the next rank, which may be read meanwhile, and receiving another.
    fn pass_on<T: Number>(&self, kv: &Tensor) -> Passing<T> {
        let room = self.device.empty(kv.rows(), kv.cols(), kv.dtype(), Tag::Buffers);
        Passing {
            sent: self.group.start_send::<T, _>(kv.clone().into(), self.next()),
            coming: self.group.start_receive::<T, _>(room.into(), self.previous()),
        }
    }

    fn wait<R>(&self, pending: Pending<R>) -> R {
        self.exposed.timed(|| pending.wait())
    }

    /// Starts receiving what the ranks before have summed up for a block.
    fn gradients_coming(&self) -> Pending<Result<Carried<f32>>> {
        let tokens = self.heads.batch * self.seq / self.group.size();
        let room = self.wide(2 * tokens, self.heads.widths().1);
        self.group.start_receive::<f32, _>(room.into(), self.previous())
    }

    fn next(&self) -> usize {
        (self.group.rank() + 1) % self.group.size()
    }

    fn previous(&self) -> usize {
        (self.group.rank() + self.group.size() - 1) % self.group.size()
    }

    fn wide(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, Dtype::F32, Tag::Buffers)
    }

    fn noughts(&self, rows: usize, cols: usize) -> Tensor {
        self.device.zeros(rows, cols, Dtype::F32, Tag::Buffers)
    }
}

/// Some tokens' keys and values of a block.
fn halves<'a>(kv: &'a Tensor, tokens: &Range<usize>) -> [View<'a>; 2] {
    let below = kv.rows() / 2;
    [0, below].map(|first| kv.view().rows_of(first + tokens.start..first + tokens.end))
}
