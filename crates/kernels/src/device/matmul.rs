//! Matrix multiplication.

use super::{Backend, Device, Fp8Scales, OpClass};
use crate::cpu::gemm::{self, Data, DataMut, Epilogue, Gemm, Matrix};
use crate::{Dtype, View, ViewMut};

/// `out = a · b`, with optional transposes and a fused epilogue: bias, then GELU, then residual.
pub struct Matmul<'a> {
    pub a: View<'a>,
    pub a_transposed: bool,
    pub b: View<'a>,
    pub b_transposed: bool,
    pub out: ViewMut<'a>,
    /// Compute `out += a · b`.
    pub accumulate: bool,
    /// Added to each row.
    pub bias: Option<View<'a>>,
    /// Apply GELU, and write its input here.
    pub gelu: Option<ViewMut<'a>>,
    /// Added last.
    pub residual: Option<View<'a>>,
    /// Multiply by the derivative of GELU at this input, (m, n): the gradient through a GELU. Not with another epilogue.
    pub gelu_backward: Option<View<'a>>,
    /// The operands are fp8 matrices, u8, with these scales.
    pub fp8: Option<Fp8Scales<'a>>,
}

impl<'a> Matmul<'a> {
    /// `out = x · wᵀ`, (rows, out): a linear layer with a weight of (out, in).
    pub fn linear(x: View<'a>, weight: View<'a>, out: ViewMut<'a>) -> Matmul<'a> {
        Matmul::plain((x, false), (weight, true), out)
    }

    /// `dx = dy · w`, (rows, in).
    pub fn linear_dx(dy: View<'a>, weight: View<'a>, dx: ViewMut<'a>) -> Matmul<'a> {
        Matmul::plain((dy, false), (weight, false), dx)
    }

    /// `dw = dyᵀ · x`, (out, in).
    pub fn linear_dw(dy: View<'a>, x: View<'a>, dw: ViewMut<'a>) -> Matmul<'a> {
        Matmul::plain((dy, true), (x, false), dw)
    }

    fn plain(a: (View<'a>, bool), b: (View<'a>, bool), out: ViewMut<'a>) -> Matmul<'a> {
        let ((a, a_transposed), (b, b_transposed)) = (a, b);
        Matmul {
            a,
            a_transposed,
            b,
            b_transposed,
            out,
            accumulate: false,
            bias: None,
            gelu: None,
            residual: None,
            gelu_backward: None,
            fp8: None,
        }
    }
}

impl Device {
    /// # Panics
    /// If the shapes do not match.
    pub fn matmul(&self, work: Matmul<'_>) {
        let (m, k) = logical(&work.a, work.a_transposed);
        let (k2, n) = logical(&work.b, work.b_transposed);
        let out = (work.out.rows(), work.out.cols());
        assert_eq!(k, k2, "({m}, {k}) · ({k2}, {n}): inner dimensions differ");
        assert_eq!(out, (m, n), "({m}, {k}) · ({k2}, {n}) does not have the shape of `out`");
        if let Some(input) = work.gelu_backward {
            assert_eq!((input.rows(), input.cols()), (m, n), "the input of GELU");
            let alone = !work.accumulate && work.bias.is_none() && work.residual.is_none();
            assert!(alone && work.gelu.is_none(), "the gradient of GELU is the only epilogue");
        }
        if let (Backend::Cpu(_), Some(fp8)) = (&self.0.backend, work.fp8) {
            return self.emulate_matmul(work, fp8);
        }
        // The CPU's multiply has no such epilogue.
        if let (Backend::Cpu(_), Some(input)) = (&self.0.backend, work.gelu_backward) {
            let Matmul { a, a_transposed, b, b_transposed, mut out, .. } = work;
            self.matmul(Matmul::plain((a, a_transposed), (b, b_transposed), out.reborrow()));
            return self.gelu_backward(input, out);
        }
        let gelu = work.gelu.inspect(|pre| assert_eq!((pre.rows(), pre.cols()), (m, n)));
        self.execute(OpClass::Matmul, |backend| match backend {
            Backend::Cpu(cpu) => {
                let a = Matrix {
                    data: data(work.a),
                    stride: work.a.cols(),
                    transposed: work.a_transposed,
                };
                let b = Matrix {
                    data: data(work.b),
                    stride: work.b.cols(),
                    transposed: work.b_transposed,
                };
                let epilogue = Epilogue {
                    bias: work.bias.map(data),
                    gelu: gelu.map(data_mut),
                    residual: work.residual.map(data),
                };
                let (out, accumulate) = (data_mut(work.out), work.accumulate);
                let gemm =
                    Gemm { m, n, k, a, b, out, out_stride: n, accumulate, scale: 1.0, epilogue };
                gemm::run(cpu, gemm)
            }
            Backend::Cuda(cuda) => {
                crate::cuda::matmul::run(cuda, Matmul { gelu, ..work }, [m, n, k])
            }
        })
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
        dtype => panic!("a matrix is f32 or bf16, not {dtype}"),
    }
}

fn data_mut(view: ViewMut<'_>) -> DataMut<'_> {
    match view.dtype() {
        Dtype::F32 => DataMut::F32(view.host()),
        Dtype::Bf16 => DataMut::Bf16(view.host()),
        dtype => panic!("a matrix is f32 or bf16, not {dtype}"),
    }
}
