//! Attention: cuDNN's fused kernels where they apply, kernels of our own for everything else. Both are deterministic
//! unless the device is told otherwise.

mod cudnn;
mod fallback;
mod graphs;
#[cfg(test)]
mod plans;

pub(crate) use cudnn::Settings;
pub(crate) use fallback::ATTENTION;
#[cfg(test)]
pub(crate) use fallback::SOURCES;

use super::{Cuda, Grid};
use crate::{AttentionShape, Dtype, View, ViewMut};

/// Columns of a matrix in device memory, from `address` on.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub address: u64,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl Rows {
    /// All columns of a view from `column` on.
    pub fn of(view: View<'_>, column: usize) -> Rows {
        let address = view.address() + (column * view.dtype().bytes()) as u64;
        Rows { address, stride: view.cols() }
    }

    pub fn of_mut(view: &ViewMut<'_>, column: usize) -> Rows {
        Rows::of(view.as_view(), column)
    }

    /// The row `rows` further, `columns` to the right.
    fn at(&self, rows: usize, columns: usize, dtype: Dtype) -> u64 {
        self.address + ((rows * self.stride + columns) * dtype.bytes()) as u64
    }
}

/// A forward pass.
pub(crate) struct Forward<'a> {
    pub shape: &'a AttentionShape,
    pub dtype: Dtype,
    pub qkv: [Rows; 3],
    /// (tokens, heads * head_dim), `dtype` or f32
    pub out: ViewMut<'a>,
    /// (batch * heads, q_len), f32
    pub lse: ViewMut<'a>,
    /// The shape changes from call to call, so that no plan is built for it.
    pub one_off: bool,
}

/// A backward pass.
pub(crate) struct Backward<'a> {
    pub shape: &'a AttentionShape,
    pub dtype: Dtype,
    pub qkv: [Rows; 3],
    pub dout: View<'a>,
    pub lse: View<'a>,
    pub delta: DeltaFrom<'a>,
    /// dq, dk and dv
    pub gradients: [Rows; 3],
    /// `dtype` or f32
    pub gradient_dtype: Dtype,
    /// Add to the gradients instead of overwriting them.
    pub accumulate: bool,
}

/// Source of Σ dout · out of each query.
#[derive(Clone, Copy)]
pub(crate) enum DeltaFrom<'a> {
    /// The output of the forward pass.
    Output(View<'a>),
    /// The sums themselves. (tokens, heads), f32
    Delta(View<'a>),
}

/// Threads of the kernels that have a warp per head of each token.
const WARP_THREADS: u32 = 256;

impl Cuda {
    pub(crate) fn attention(&self, pass: Forward<'_>) {
        check(pass.shape, pass.out.len(), pass.lse.len());
        if pass.lse.is_empty() {
            return;
        }
        if !cudnn::forward(self, &pass) {
            fallback::forward(self, &pass);
        }
    }

    pub(crate) fn attention_backward(&self, pass: Backward<'_>) {
        check(pass.shape, pass.dout.len(), pass.lse.len());
        if !cudnn::backward(self, &pass) {
            fallback::backward(self, &pass);
        }
    }

    pub(crate) fn attention_merge(
        &self,
        shape: &AttentionShape,
        (out, lse): (ViewMut<'_>, ViewMut<'_>),
        (other_out, other_lse): (View<'_>, View<'_>),
    ) {
        let AttentionShape { heads, head_dim, q_len, .. } = *shape;
        let count = lse.len();
        let args = [
            out.into(),
            lse.into(),
            other_out.into(),
            other_lse.into(),
            (count as i64).into(),
            (heads as i32).into(),
            (q_len as i32).into(),
            (head_dim as i32).into(),
        ];
        self.launch(&ATTENTION, "attention_merge_f32", warp_each(count), &args);
    }

    pub(crate) fn attention_delta(&self, out: View<'_>, dout: View<'_>, delta: ViewMut<'_>) {
        let count = delta.len();
        let head_dim = out.len().checked_div(count).unwrap_or(0);
        delta_to(self, (out, dout), delta.address(), (count, head_dim));
    }
}

/// # Panics
/// If the shape is invalid, or the output or the log-sum-exp have other sizes.
fn check(shape: &AttentionShape, out_len: usize, lse_len: usize) {
    let AttentionShape { batch, heads, kv_heads, head_dim, q_len, .. } = *shape;
    assert!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "kv_heads={kv_heads} does not divide heads={heads}"
    );
    let rows = batch * heads * q_len;
    assert_eq!((out_len, lse_len), (rows * head_dim, rows), "out and lse of {shape:?}");
}

/// Computes Σ dout · out of `count` heads.
fn delta_to(
    cuda: &Cuda,
    (out, dout): (View<'_>, View<'_>),
    delta: u64,
    (count, head_dim): (usize, usize),
) {
    let kernel = match out.dtype() {
        Dtype::Bf16 => "attention_delta_bf16",
        _ => "attention_delta_f32",
    };
    let args =
        [out.into(), dout.into(), delta.into(), (count as i64).into(), (head_dim as i32).into()];
    cuda.launch(&ATTENTION, kernel, warp_each(count), &args);
}

/// A warp for each of `count` heads of tokens.
fn warp_each(count: usize) -> Grid {
    Grid::new(count.div_ceil(WARP_THREADS as usize / 32), WARP_THREADS)
}
