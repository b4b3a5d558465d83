//! Causal attention with grouped key heads.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::attention::{self, DeltaFrom, Gradients, Rows, RowsMut, Saved};
use crate::cuda::attention as cuda;
use crate::{Dtype, Element, View, ViewMut};

/// Sizes of an attention, and the positions of its queries and keys. Query i attends to key j if
/// `k_start + j <= q_start + i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub batch: usize,
    pub heads: usize,
    /// Number of key and value heads, a divisor of `heads`. Consecutive query heads share one.
    pub kv_heads: usize,
    pub head_dim: usize,
    pub q_len: usize,
    pub k_len: usize,
    pub q_start: usize,
    pub k_start: usize,
    /// Factor of the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
}

impl AttentionShape {
    /// Self-attention of whole sequences.
    pub fn square(
        batch: usize,
        seq: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> AttentionShape {
        AttentionShape {
            batch,
            heads,
            kv_heads,
            head_dim,
            q_len: seq,
            k_len: seq,
            q_start: 0,
            k_start: 0,
            scale: 1.0 / (head_dim as f32).sqrt(),
        }
    }

    /// Query heads per key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Columns of queries, and columns of keys or values.
    fn widths(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }
}

/// Results of the forward pass and the gradient of its output.
#[derive(Clone, Copy)]
pub struct AttentionOutput<'a> {
    pub out: View<'a>,  // (tokens, heads * head_dim)
    pub lse: View<'a>,  // (batch * heads, q_len), f32
    pub dout: View<'a>, // as out
}

/// Inputs of a backward pass over blocks of keys. All of them cover all blocks.
#[derive(Clone, Copy)]
pub struct AttentionDelta<'a> {
    pub dout: View<'a>, // (tokens, heads * head_dim)
    pub lse: View<'a>,  // (batch * heads, q_len), f32
    /// See [`Device::attention_delta`].
    pub delta: View<'a>, // (tokens, heads), f32
}

impl Device {
    /// Whether the gradients of attention have the same bits in every run. They do by default; without it, a GPU may
    /// be faster and need less memory. The CPU is always deterministic.
    pub fn set_deterministic_attention(&self, deterministic: bool) {
        match &self.0.backend {
            Backend::Cpu(_) => {}
            Backend::Cuda(device) => device.set_deterministic_attention(deterministic),
        }
    }

    /// Attention of `qkv` (tokens, (heads + 2 kv_heads) * head_dim). `lse` (batch * heads, q_len) receives the
    /// log-sum-exp of the scores for the backward pass.
    pub fn attention(
        &self,
        shape: &AttentionShape,
        qkv: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) {
        let (q, kv) = shape.widths();
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(qkv.dtype(), E => {
                let (data, stride) = (qkv.host::<E>(), qkv.cols());
                let at = |offset| Rows { data, offset, stride };
                let out = out.host::<E>();
                attention::forward(cpu, shape, [at(0), at(q), at(q + kv)], out, lse.host())
            }),
            Backend::Cuda(device) => {
                let (dtype, qkv) = (qkv.dtype(), packed(qkv, shape));
                device.attention(cuda::Forward { shape, dtype, qkv, out, lse, one_off: false })
            }
        })
    }

    /// Attention over one block of keys. The queries are the first columns of `q`; `out` has the same dtype or f32.
    pub fn attention_block(
        &self,
        shape: &AttentionShape,
        [q, k, v]: [View<'_>; 3],
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
    ) {
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(q.dtype(), E => {
                let (same, lse) = (out.dtype() == q.dtype(), lse.host());
                let qkv = [rows::<E>(q), rows::<E>(k), rows::<E>(v)];
                match same {
                    true => attention::forward(cpu, shape, qkv, out.host::<E>(), lse),
                    false => attention::forward(cpu, shape, qkv, out.host::<f32>(), lse),
                }
            }),
            Backend::Cuda(device) => {
                let (dtype, qkv) = (q.dtype(), [q, k, v].map(|view| cuda::Rows::of(view, 0)));
                // Generation does not ask for f32, and its keys grow with each token.
                let one_off = out.dtype() != Dtype::F32;
                device.attention(cuda::Forward { shape, dtype, qkv, out, lse, one_off })
            }
        })
    }

    /// Merges the output of another block of keys into `out` and `lse`, all f32.
    pub fn attention_merge(
        &self,
        shape: &AttentionShape,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        other_out: View<'_>,
        other_lse: View<'_>,
    ) {
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => {
                let (out, lse) = (out.host::<f32>(), lse.host());
                attention::merge(cpu, shape, out, lse, (other_out.host(), other_lse.host()))
            }
            Backend::Cuda(device) => {
                device.attention_merge(shape, (out, lse), (other_out, other_lse))
            }
        })
    }

    /// Sum of `dout * out` over each head of each token, (tokens, heads), f32. A backward pass over blocks of keys
    /// needs nothing else of the output.
    pub fn attention_delta(&self, out: View<'_>, dout: View<'_>, delta: ViewMut<'_>) {
        let head_dim = out.cols() / delta.cols();
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(out.dtype(), E => {
                attention::delta::<E>(cpu, head_dim, out.host(), dout.host(), delta.host())
            }),
            Backend::Cuda(device) => device.attention_delta(out, dout, delta),
        })
    }

    /// Gradient of `qkv`.
    pub fn attention_backward(
        &self,
        shape: &AttentionShape,
        qkv: View<'_>,
        output: AttentionOutput<'_>,
        dqkv: ViewMut<'_>,
    ) {
        let AttentionOutput { out, lse, dout } = output;
        let (q, kv) = shape.widths();
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(qkv.dtype(), E => {
                let (data, stride) = (qkv.host::<E>(), qkv.cols());
                let at = |offset| Rows { data, offset, stride };
                let parts = [0..q, q..q + kv, q + kv..q + 2 * kv];
                let [dq, dk, dv] = RowsMut::columns(dqkv.host::<E>(), stride, parts);
                let delta = DeltaFrom::Output(out.host());
                let saved = Saved { dout: dout.host(), lse: lse.host(), delta };
                let gradients = Gradients { dq, dk, dv, accumulate: false };
                attention::backward(cpu, shape, [at(0), at(q), at(q + kv)], saved, gradients)
            }),
            Backend::Cuda(device) => {
                let delta = cuda::DeltaFrom::Output(out);
                device.attention_backward(whole(shape, qkv, (dout, lse, delta), dqkv))
            }
        })
    }

    /// Gradient of `qkv`, from `delta` instead of the output.
    pub fn attention_backward_delta(
        &self,
        shape: &AttentionShape,
        qkv: View<'_>,
        given: AttentionDelta<'_>,
        dqkv: ViewMut<'_>,
    ) {
        let AttentionDelta { dout, lse, delta } = given;
        let (q, kv) = shape.widths();
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(qkv.dtype(), E => {
                let (data, stride) = (qkv.host::<E>(), qkv.cols());
                let at = |offset| Rows { data, offset, stride };
                let parts = [0..q, q..q + kv, q + kv..q + 2 * kv];
                let [dq, dk, dv] = RowsMut::columns(dqkv.host::<E>(), stride, parts);
                let delta = DeltaFrom::Delta(delta.host());
                let saved = Saved { dout: dout.host(), lse: lse.host(), delta };
                let gradients = Gradients { dq, dk, dv, accumulate: false };
                attention::backward(cpu, shape, [at(0), at(q), at(q + kv)], saved, gradients)
            }),
            Backend::Cuda(device) => {
                let delta = cuda::DeltaFrom::Delta(delta);
                device.attention_backward(whole(shape, qkv, (dout, lse, delta), dqkv))
            }
        })
    }

    /// Adds one block's part of the gradients to `dq`, `dk` and `dv`, all f32. `q` and `dq` are the first columns of
    /// their rows.
    pub fn attention_block_backward(
        &self,
        shape: &AttentionShape,
        [q, k, v]: [View<'_>; 3],
        given: AttentionDelta<'_>,
        [dq, dk, dv]: [ViewMut<'_>; 3],
    ) {
        let AttentionDelta { dout, lse, delta } = given;
        let (width, kv_width) = shape.widths();
        self.execute(OpClass::Attention, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(q.dtype(), E => {
                let qkv = [rows::<E>(q), rows::<E>(k), rows::<E>(v)];
                let dq = first_columns(dq, width);
                let (dk, dv) = (first_columns(dk, kv_width), first_columns(dv, kv_width));
                let delta = DeltaFrom::Delta(delta.host());
                let saved = Saved { dout: dout.host(), lse: lse.host(), delta };
                attention::backward(cpu, shape, qkv, saved, Gradients { dq, dk, dv, accumulate: true })
            }),
            Backend::Cuda(device) => device.attention_backward(cuda::Backward {
                shape,
                dtype: q.dtype(),
                qkv: [q, k, v].map(|view| cuda::Rows::of(view, 0)),
                dout,
                lse,
                delta: cuda::DeltaFrom::Delta(delta),
                gradients: [&dq, &dk, &dv].map(|view| cuda::Rows::of_mut(view, 0)),
                gradient_dtype: dq.dtype(),
                accumulate: true,
            }),
        })
    }
}

/// q, k and v of packed rows in device memory.
fn packed(qkv: View<'_>, shape: &AttentionShape) -> [cuda::Rows; 3] {
    let (q, kv) = shape.widths();
    [0, q, q + kv].map(|column| cuda::Rows::of(qkv, column))
}

/// The backward pass of whole sequences on a GPU.
fn whole<'a>(
    shape: &'a AttentionShape,
    qkv: View<'a>,
    (dout, lse, delta): (View<'a>, View<'a>, cuda::DeltaFrom<'a>),
    dqkv: ViewMut<'a>,
) -> cuda::Backward<'a> {
    cuda::Backward {
        shape,
        dtype: qkv.dtype(),
        qkv: packed(qkv, shape),
        dout,
        lse,
        delta,
        gradients: packed(dqkv.as_view(), shape),
        gradient_dtype: dqkv.dtype(),
        accumulate: false,
    }
}

fn first_columns(view: ViewMut<'_>, width: usize) -> RowsMut<'_, f32> {
    let stride = view.cols();
    #[allow(clippy::single_range_in_vec_init)] // one range of columns, not a list of numbers
    let [first] = RowsMut::columns(view.host(), stride, [0..width]);
    first
}

/// All columns of a view.
fn rows<E: Element>(view: View<'_>) -> Rows<'_, E> {
    Rows { data: view.host(), offset: 0, stride: view.cols() }
}
