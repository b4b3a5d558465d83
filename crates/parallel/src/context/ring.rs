//! Ring attention (Liu et al. 2023): every rank keeps its queries, and blocks of keys and values are passed from rank
//! to rank. A block is sent on before the local queries attend to it, so that communication overlaps with compute.
//! Blocks that no local query may see are passed on without computing.
//!
//! Sums over blocks are in f32 and in the order of the ring, independent of timing: the same bits every time.

use std::ops::Range;

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Group, Result};
use lockstep_kernels::{AttentionDelta, AttentionShape, Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::context::ring_shard;

use super::Heads;
use super::layout;
use crate::collectives::{Transfer, start_receive, start_send};
use crate::exposed::Exposed;

pub(super) struct Ring<'a> {
    pub group: &'a Group,
    pub device: &'a Device,
    pub heads: Heads,
    /// Length of whole sequences.
    pub seq: usize,
    pub exposed: &'a Exposed,
}

/// A run of this rank's queries and a run of keys, at least one of which they see.
struct RunPair {
    shape: AttentionShape,
    /// Rows among this rank's tokens.
    queries: Range<usize>,
    /// Rows among the tokens of the keys' owner.
    keys: Range<usize>,
    /// Whether this is the first pair with these queries.
    first: bool,
}

/// A block on its way to the next rank, and another from the previous one.
struct Exchange {
    send: Transfer,
    receive: Transfer,
}

impl Exchange {
    fn wait(self) -> Result<Tensor> {
        self.send.wait()?;
        self.receive.wait()
    }
}

impl Ring<'_> {
    /// Attention over the tokens of all ranks of the ring. Returns the log-sum-exp.
    ///
    /// r-1 messages of one block each; bytes: [`lockstep_plan::context::ring_sent`].
    pub fn forward(
        &self,
        qkv: View<'_>,        // (tokens, (heads + 2 kv_heads) * head_dim)
        mut out: ViewMut<'_>, // (tokens, heads * head_dim)
    ) -> Result<Tensor> {
        let Heads { batch, heads, .. } = self.heads;
        let len = qkv.rows() / batch;
        // (batch, heads, len) run by run
        let mut lse = self.device.empty(batch * heads, len, Dtype::F32, Tag::Activations);
        // An f32 output is accumulated in place.
        let is_f32 = out.dtype() == Dtype::F32;
        let mut sums = (!is_f32).then(|| self.f32(out.rows(), out.cols()));
        let mut part = self.f32(out.rows(), out.cols());
        let mut part_lse = self.f32(1, lse.len());

        let mut kv = self.pack_kv(qkv);
        for step in 0..self.group.size() {
            let exchange = (step + 1 < self.group.size()).then(|| self.pass_on(&kv));
            for RunPair { shape, queries, keys, first } in self.pairs(step) {
                let (q, [k, v]) = (qkv.rows_of(queries.clone()), keys_and_values(&kv, &keys));
                let sums = sums.as_mut().map_or_else(|| out.reborrow(), Tensor::view_mut);
                let (sums, lse_range) = (sums.rows_of(queries.clone()), self.lse_range(&queries));
                let lse = lse.view_mut().part(lse_range.clone());
                if first {
                    self.device.attention_block(&shape, [q, k, v], sums, lse);
                    continue;
                }
                let to = part.view_mut().rows_of(queries.clone());
                let to_lse = part_lse.view_mut().part(lse_range.clone());
                self.device.attention_block(&shape, [q, k, v], to, to_lse);
                let (part, part_lse) =
                    (part.view().rows_of(queries), part_lse.view().part(lse_range));
                self.device.attention_merge(&shape, sums, lse, part, part_lse);
            }
            if let Some(exchange) = exchange {
                kv = self.exposed.timed(CommAxis::Context, || exchange.wait())?;
            }
        }
        if let Some(sums) = sums {
            self.device.cast(sums.view(), out);
        }
        Ok(lse)
    }

    /// Computes the gradients of this rank's tokens. Keys and values go round once more, and their gradients follow:
    /// started by the rank after their owner, added to by each rank, and returned by the last.
    ///
    /// 2(r-1) messages; bytes: [`lockstep_plan::context::ring_sent`].
    pub fn backward(
        &self,
        qkv: View<'_>, // (tokens, (heads + 2 kv_heads) * head_dim)
        known: AttentionDelta<'_>,
        mut dqkv: ViewMut<'_>, // as qkv
    ) -> Result<()> {
        let (size, (width, kv_width)) = (self.group.size(), self.heads.widths());
        let mut dq = (dqkv.dtype() != Dtype::F32).then(|| self.zeros(qkv.rows(), width));
        if dq.is_none() {
            self.device.fill(dqkv.reborrow(), 0.0);
        }
        let mut attend = |step: usize, kv: &Tensor, dkv: &mut Tensor| {
            for RunPair { shape, queries, keys, .. } in self.pairs(step) {
                let dq = dq.as_mut().map_or_else(|| dqkv.reborrow(), Tensor::view_mut);
                let (q, [k, v]) = (qkv.rows_of(queries.clone()), keys_and_values(kv, &keys));
                let known = AttentionDelta {
                    dout: known.dout.rows_of(queries.clone()),
                    lse: known.lse.part(self.lse_range(&queries)),
                    delta: known.delta.rows_of(queries.clone()),
                };
                let (tokens, cols) = (dkv.rows() / 2, dkv.cols());
                let (dk, dv) = dkv.view_mut().split_at(tokens * cols);
                let [dk, dv] = [dk, dv].map(|half| half.shaped(tokens, cols).rows_of(keys.clone()));
                let gradients = [dq.rows_of(queries), dk, dv];
                self.device.attention_block_backward(&shape, [q, k, v], known, gradients);
            }
        };

        let mut kv = self.pack_kv(qkv);
        let exchange = self.pass_on(&kv);
        let mut own = self.zeros(kv.rows(), kv.cols());
        attend(0, &kv, &mut own);
        kv = self.exposed.timed(CommAxis::Context, || exchange.wait())?;

        let mut sent: Option<Transfer> = None;
        for step in 1..size {
            // Messages from one rank arrive in order: the gradients of this step before the keys of the next.
            let arriving = (step > 1).then(|| self.receive_gradients());
            let exchange = (step + 1 < size).then(|| self.pass_on(&kv));
            let mut dkv = self.zeros(kv.rows(), kv.cols());
            attend(step, &kv, &mut dkv);
            if let Some(arriving) = arriving {
                self.device.add(dkv.view_mut(), self.wait(arriving)?.view());
            }
            if let Some(sent) = sent.take() {
                self.wait(sent)?;
            }
            sent = Some(start_send(self.device, self.group, dkv, self.next()));
            if let Some(exchange) = exchange {
                kv = self.exposed.timed(CommAxis::Context, || exchange.wait())?;
            }
        }
        drop(kv);
        let from_others = self.wait(self.receive_gradients())?;
        self.device.add(own.view_mut(), from_others.view());
        if let Some(sent) = sent {
            self.wait(sent)?;
        }

        if let Some(dq) = dq {
            self.device.place_columns(dq.view(), 0..width, dqkv.reborrow(), 0);
        }
        let [dk, dv] = keys_and_values(&own, &(0..qkv.rows()));
        self.device.place_columns(dk, 0..kv_width, dqkv.reborrow(), width);
        self.device.place_columns(dv, 0..kv_width, dqkv, width + kv_width);
        Ok(())
    }

    /// The pairs of runs in a step, in which the keys belong to the rank `step` before this one.
    fn pairs(&self, step: usize) -> Vec<RunPair> {
        let (size, me, batch) = (self.group.size(), self.group.rank(), self.heads.batch);
        let own_runs = ring_shard(self.seq, size, me);
        let key_runs = ring_shard(self.seq, size, (me + size - step) % size);
        let mut pairs = Vec::new();
        for (run, queries) in layout::rows(&own_runs, batch) {
            let seen = layout::rows(&key_runs, batch).filter(|(other, _)| other.start < run.end());
            pairs.extend(seen.enumerate().map(|(number, (other, keys))| RunPair {
                shape: self.heads.cross(run, other),
                queries: queries.clone(),
                keys,
                // Every query sees at least its own key, which is on this rank.
                first: step == 0 && number == 0,
            }));
        }
        pairs
    }

    /// The log-sum-exps of some rows.
    fn lse_range(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.heads.heads..rows.end * self.heads.heads
    }

    /// This rank's keys, and below them its values: (2 tokens, kv_heads * head_dim).
    fn pack_kv(&self, qkv: View<'_>) -> Tensor {
        let (tokens, (width, kv_width)) = (qkv.rows(), self.heads.widths());
        let mut kv = self.device.empty(2 * tokens, kv_width, qkv.dtype(), Tag::Buffers);
        self.device.copy_columns(qkv, width, kv.view_mut().rows_of(0..tokens));
        self.device.copy_columns(qkv, width + kv_width, kv.view_mut().rows_of(tokens..2 * tokens));
        kv
    }

    /// Starts sending a block to the next rank and receiving another from the previous one. The block may be read
    /// meanwhile.
    fn pass_on(&self, kv: &Tensor) -> Exchange {
        let buffer = self.device.empty(kv.rows(), kv.cols(), kv.dtype(), Tag::Buffers);
        Exchange {
            send: start_send(self.device, self.group, kv.clone(), self.next()),
            receive: start_receive(self.device, self.group, buffer, self.previous()),
        }
    }

    /// Starts receiving the gradients that the previous ranks have summed for a block.
    fn receive_gradients(&self) -> Transfer {
        let tokens = self.heads.batch * self.seq / self.group.size();
        let buffer = self.f32(2 * tokens, self.heads.widths().1);
        start_receive(self.device, self.group, buffer, self.previous())
    }

    fn wait(&self, transfer: Transfer) -> Result<Tensor> {
        self.exposed.timed(CommAxis::Context, || transfer.wait())
    }

    fn next(&self) -> usize {
        (self.group.rank() + 1) % self.group.size()
    }

    fn previous(&self) -> usize {
        (self.group.rank() + self.group.size() - 1) % self.group.size()
    }

    fn f32(&self, rows: usize, cols: usize) -> Tensor {
        self.device.empty(rows, cols, Dtype::F32, Tag::Buffers)
    }

    fn zeros(&self, rows: usize, cols: usize) -> Tensor {
        self.device.zeros(rows, cols, Dtype::F32, Tag::Buffers)
    }
}

/// The keys and the values of some tokens of a block.
fn keys_and_values<'a>(kv: &'a Tensor, tokens: &Range<usize>) -> [View<'a>; 2] {
    let values = kv.rows() / 2;
    [0, values].map(|first| kv.view().rows_of(first + tokens.start..first + tokens.end))
}
