//! Causal attention with grouped keys, and the rotary embedding of its queries and keys.

use super::{Device, Operation, with_float};
use crate::cpu::attention::{self, Rows, RowsMut};
use crate::cpu::rope::{self, Positions, Rope, Table};
use crate::{Element, View, ViewMut};

/// Sizes, and where queries and keys stand. Key j is seen by query i if `k_start + j <= q_start + i`.
pub use crate::cpu::attention::Shape as Attention;

impl Attention {
    /// Sequences that look at themselves, from their beginning.
    pub fn square(
        batch: usize,
        seq: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Attention {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Attention {
            batch,
            heads,
            kv_heads,
            head_dim,
            q_len: seq,
            k_len: seq,
            q_start: 0,
            k_start: 0,
            scale,
        }
    }

    /// Columns of queries, and of keys or values.
    fn widths(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }
}

impl Device {
    /// Queries, keys and values lie side by side in the rows of `qkv`. `lse` (batch * heads, seq) receives
    /// what the backward pass needs.
    pub fn attention(&self, shape: &Attention, qkv: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) {
        let (q, kv) = shape.widths();
        with_float!(qkv.dtype(), E => self.on_cpu(Operation::Attention, |cpu| {
            let (data, stride) = (qkv.host::<E>(), qkv.cols());
            let at = |offset| Rows { data, offset, stride };
            attention::forward(cpu, shape, at(0), at(q), at(q + kv), out.host(), lse.host())
        }))
    }

    /// Queries in the first columns of `q`'s rows; keys and values each in rows of their own.
    pub fn attention_over(
        &self,
        shape: &Attention,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) {
        with_float!(q.dtype(), E => self.on_cpu(Operation::Attention, |cpu| {
            attention::forward(cpu, shape, rows::<E>(q), rows(k), rows(v), out.host(), lse.host())
        }))
    }

    /// Turns queries and keys, side by side in the rows of `qkv`, by their positions.
    pub fn rope(&self, table: &Table, shape: &Attention, qkv: ViewMut<'_>) {
        let rope = turned(table, shape, &qkv);
        with_float!(qkv.dtype(), E => self.on_cpu(Operation::Rope, |cpu| {
            rope::forward::<E>(cpu, qkv.host(), &rope)
        }))
    }

    /// Turns their gradients back.
    pub fn rope_backward(&self, table: &Table, shape: &Attention, dqkv: ViewMut<'_>) {
        let rope = turned(table, shape, &dqkv);
        with_float!(dqkv.dtype(), E => self.on_cpu(Operation::Rope, |cpu| {
            rope::backward::<E>(cpu, dqkv.host(), &rope)
        }))
    }

    /// From the gradient of the output to that of queries, keys and values, side by side.
    pub fn attention_backward(
        &self,
        shape: &Attention,
        qkv: View<'_>,
        out: View<'_>,
        dout: View<'_>,
        lse: View<'_>,
        dqkv: ViewMut<'_>,
    ) {
        let (q, kv) = shape.widths();
        with_float!(qkv.dtype(), E => self.on_cpu(Operation::Attention, |cpu| {
            let (data, stride) = (qkv.host::<E>(), qkv.cols());
            let at = |offset| Rows { data, offset, stride };
            let parts = [0..q, q..q + kv, q + kv..q + 2 * kv];
            let [dq, dk, dv] = RowsMut::columns(dqkv.host::<E>(), stride, parts);
            let (out, dout, lse) = (out.host(), dout.host(), lse.host());
            attention::backward(cpu, shape, at(0), at(q), at(q + kv), out, dout, lse, dq, dk, dv)
        }))
    }
}

/// All columns of a view.
fn rows<E: Element>(view: View<'_>) -> Rows<'_, E> {
    Rows { data: view.host(), offset: 0, stride: view.cols() }
}

/// The heads of queries and keys in rows that also hold values.
fn turned<'a>(table: &'a Table, shape: &Attention, qkv: &ViewMut<'_>) -> Rope<'a> {
    let positions = Positions::From { start: shape.q_start, len: shape.q_len };
    let (rows, heads) = (qkv.rows(), shape.heads + shape.kv_heads);
    Rope { table, rows, heads, offset: 0, stride: qkv.cols(), positions }
}
