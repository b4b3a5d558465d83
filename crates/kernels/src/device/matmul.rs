//! Matrix multiply.

use super::{Device, OpClass};
use crate::cpu::gemm::{self, Data, DataMut, Epilogue, Gemm, Matrix};
use crate::{Dtype, View, ViewMut};

/// `out = a · b`, each operand as it lies or transposed, and what is done to each element on the way out.
pub struct Matmul<'a> {
    pub a: View<'a>,
    pub a_transposed: bool,
    pub b: View<'a>,
    pub b_transposed: bool,
    pub out: ViewMut<'a>,
    /// `out +=` instead of `out =`.
    pub accumulate: bool,
    /// Added to each row.
    pub bias: Option<View<'a>>,
    /// GELU is the last act but the residual, and its input is written here.
    pub gelu: Option<ViewMut<'a>>,
    /// Added last.
    pub residual: Option<View<'a>>,
}

impl<'a> Matmul<'a> {
    /// `out = x · wᵀ` (rows, out): a linear layer whose weight lies as (out, in).
    pub fn linear(x: View<'a>, weight: View<'a>, out: ViewMut<'a>) -> Matmul<'a> {
        Matmul::plain((x, false), (weight, true), out)
    }

    /// `dx = dy · w` (rows, in).
    pub fn linear_dx(dy: View<'a>, weight: View<'a>, dx: ViewMut<'a>) -> Matmul<'a> {
        Matmul::plain((dy, false), (weight, false), dx)
    }

    /// `dw = dyᵀ · x` (out, in).
    pub fn linear_dw(dy: View<'a>, x: View<'a>, dw: ViewMut<'a>) -> Matmul<'a> {
        Matmul::plain((dy, true), (x, false), dw)
    }

    fn plain(a: (View<'a>, bool), b: (View<'a>, bool), out: ViewMut<'a>) -> Matmul<'a> {
        let ((a, a_transposed), (b, b_transposed)) = (a, b);
        let (bias, gelu, residual) = (None, None, None);
        Matmul { a, a_transposed, b, b_transposed, out, accumulate: false, bias, gelu, residual }
    }
}

impl Device {
    /// # Panics
    /// When shapes do not fit each other.
    pub fn matmul(&self, work: Matmul<'_>) {
        let (m, k) = logical(&work.a, work.a_transposed);
        let (k2, n) = logical(&work.b, work.b_transposed);
        assert_eq!(k, k2, "({m}, {k}) times ({k2}, {n})");
        assert_eq!((work.out.rows(), work.out.cols()), (m, n), "the product is ({m}, {n})");
        let gelu = work.gelu.inspect(|pre| assert_eq!((pre.rows(), pre.cols()), (m, n)));
        let gemm = Gemm {
            m,
            n,
            k,
            a: Matrix { data: data(work.a), stride: work.a.cols(), transposed: work.a_transposed },
            b: Matrix { data: data(work.b), stride: work.b.cols(), transposed: work.b_transposed },
            out: data_mut(work.out),
            out_stride: n,
            accumulate: work.accumulate,
            scale: 1.0,
            epilogue: Epilogue {
                bias: work.bias.map(data),
                gelu: gelu.map(data_mut),
                residual: work.residual.map(data),
            },
        };
        self.on_cpu(OpClass::Matmul, |cpu| gemm::run(cpu, gemm));
    }
}

/// Rows and columns after transposing.
fn logical(view: &View<'_>, transposed: bool) -> (usize, usize) {
    if transposed { (view.cols(), view.rows()) } else { (view.rows(), view.cols()) }
}

fn data(view: View<'_>) -> Data<'_> {
    match view.dtype() {
        Dtype::F32 => Data::F32(view.host()),
        Dtype::Bf16 => Data::Bf16(view.host()),
        dtype => panic!("matrices are f32 or bf16, not {dtype}"),
    }
}

fn data_mut(view: ViewMut<'_>) -> DataMut<'_> {
    match view.dtype() {
        Dtype::F32 => DataMut::F32(view.host()),
        Dtype::Bf16 => DataMut::Bf16(view.host()),
        dtype => panic!("matrices are f32 or bf16, not {dtype}"),
    }
}
