//! Causal attention with grouped keys, and the rotary embedding of its queries and keys.

use super::{Device, OpClass, with_float};
use crate::cpu::attention::{self, Rows, RowsMut};
use crate::cpu::rope::{self, Positions, Rope, Table};
use crate::{Element, Float, View, ViewMut};

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
        with_float!(qkv.dtype(), E => self.on_cpu(OpClass::Attention, |cpu| {
            let (data, stride) = (qkv.host::<E>(), qkv.cols());
            let at = |offset| Rows { data, offset, stride };
            let out = out.host::<E>();
            attention::forward(cpu, shape, at(0), at(q), at(q + kv), out, lse.host())
        }))
    }

    /// Queries in the first columns of `q`'s rows; keys and values each in rows of their own. `out` may be f32
    /// whatever they are.
    pub fn attention_over(
        &self,
        shape: &Attention,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) {
        with_float!(q.dtype(), E => match out.dtype() == q.dtype() {
            true => self.attention_into::<E, E>(shape, [q, k, v], out, lse),
            false => self.attention_into::<E, f32>(shape, [q, k, v], out, lse),
        })
    }

    fn attention_into<E: Float, O: Float>(
        &self,
        shape: &Attention,
        [q, k, v]: [View<'_>; 3],
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) {
        self.on_cpu(OpClass::Attention, |cpu| {
            let (q, k, v) = (rows::<E>(q), rows::<E>(k), rows::<E>(v));
            attention::forward(cpu, shape, q, k, v, out.host::<O>(), lse.host())
        })
    }

    /// Takes what came of another block of keys into `out` and `lse`: afterwards they are those of both. In f32.
    pub fn attention_merge(
        &self,
        shape: &Attention,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        other_out: View<'_>,
        other_lse: View<'_>,
    ) {
        self.on_cpu(OpClass::Attention, |cpu| {
            let (out, lse) = (out.host::<f32>(), lse.host());
            attention::merge(cpu, shape, out, lse, other_out.host(), other_lse.host())
        })
    }

    /// The sum of dout out over each head of each token: all that a backward pass over blocks of keys wants of
    /// the output. `delta` is (tokens, heads), f32.
    pub fn attention_delta(&self, out: View<'_>, dout: View<'_>, delta: ViewMut<'_>) {
        let head_dim = out.cols() / delta.cols();
        with_float!(out.dtype(), E => self.on_cpu(OpClass::Attention, |cpu| {
            attention::delta::<E>(cpu, head_dim, out.host(), dout.host(), delta.host())
        }))
    }

    /// Turns queries and keys, side by side in the rows of `qkv`, by their positions.
    pub fn rope(&self, table: &Table, shape: &Attention, qkv: ViewMut<'_>) {
        let rope = turned(table, shape, &qkv);
        with_float!(qkv.dtype(), E => self.on_cpu(OpClass::Rope, |cpu| {
            rope::forward::<E>(cpu, qkv.host(), &rope)
        }))
    }

    /// Turns their gradients back.
    pub fn rope_backward(&self, table: &Table, shape: &Attention, dqkv: ViewMut<'_>) {
        let rope = turned(table, shape, &dqkv);
        with_float!(dqkv.dtype(), E => self.on_cpu(OpClass::Rope, |cpu| {
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
        with_float!(qkv.dtype(), E => self.on_cpu(OpClass::Attention, |cpu| {
            let (data, stride) = (qkv.host::<E>(), qkv.cols());
            let at = |offset| Rows { data, offset, stride };
            let parts = [0..q, q..q + kv, q + kv..q + 2 * kv];
            let [dq, dk, dv] = RowsMut::columns(dqkv.host::<E>(), stride, parts);
            let (out, dout, lse) = (out.host(), dout.host(), lse.host());
            attention::backward(cpu, shape, at(0), at(q), at(q + kv), out, dout, lse, dq, dk, dv)
        }))
    }

    /// A block of keys' share of the gradients, added to those in f32 of all blocks: `dq` in the first columns
    /// of its rows, like `q`; `dk` and `dv` in rows of their own.
    pub fn attention_backward_over(
        &self,
        shape: &Attention,
        [q, k, v]: [View<'_>; 3],
        known: AttentionKnown<'_>,
        [dq, dk, dv]: [ViewMut<'_>; 3],
    ) {
        let AttentionKnown { dout, lse, delta } = known;
        let (width, kv_width) = shape.widths();
        with_float!(q.dtype(), E => self.on_cpu(OpClass::Attention, |cpu| {
            let (q, k, v) = (rows::<E>(q), rows::<E>(k), rows::<E>(v));
            let (dq, dk, dv) = (first_columns(dq, width), first_columns(dk, kv_width), first_columns(dv, kv_width));
            let (delta, dout, lse) = (delta.host(), dout.host(), lse.host());
            attention::backward_block::<E, f32>(cpu, shape, q, k, v, delta, dout, lse, dq, dk, dv, true)
        }))
    }

    /// As `attention_backward`, with `delta` in the place of the output.
    pub fn attention_backward_known(
        &self,
        shape: &Attention,
        qkv: View<'_>,
        known: AttentionKnown<'_>,
        dqkv: ViewMut<'_>,
    ) {
        let AttentionKnown { dout, lse, delta } = known;
        let (q, kv) = shape.widths();
        with_float!(qkv.dtype(), E => self.on_cpu(OpClass::Attention, |cpu| {
            let (data, stride) = (qkv.host::<E>(), qkv.cols());
            let at = |offset| Rows { data, offset, stride };
            let parts = [0..q, q..q + kv, q + kv..q + 2 * kv];
            let [dq, dk, dv] = RowsMut::columns(dqkv.host::<E>(), stride, parts);
            let (q, k, v) = (at(0), at(q), at(q + kv));
            let (delta, dout, lse) = (delta.host(), dout.host(), lse.host());
            attention::backward_block(cpu, shape, q, k, v, delta, dout, lse, dq, dk, dv, false)
        }))
    }
}

/// What a backward pass over blocks of keys knows of its queries, from all blocks together.
#[derive(Clone, Copy)]
pub struct AttentionKnown<'a> {
    /// The gradient of the output. (tokens, heads * head_dim)
    pub dout: View<'a>,
    /// (batch, heads, q_len), f32
    pub lse: View<'a>,
    /// See [`Device::attention_delta`]. (tokens, heads), f32
    pub delta: View<'a>,
}

fn first_columns(view: ViewMut<'_>, width: usize) -> RowsMut<'_, f32> {
    let stride = view.cols();
    #[allow(clippy::single_range_in_vec_init)] // one part, of the first columns
    let [first] = RowsMut::columns(view.host(), stride, [0..width]);
    first
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
