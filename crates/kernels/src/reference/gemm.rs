//! Matrix multiplication by definition, in f64.

use crate::Float;
use crate::cpu::gemm::{Data, DataMut, Gemm, Matrix};
use half::bf16;

/// Same result as `cpu::gemm::run`, up to rounding.
pub fn run(gemm: Gemm<'_>) {
    let Gemm { m, n, k, a, b, mut out, out_stride, accumulate, scale, mut epilogue } = gemm;
    let rounded = matches!(a.data, Data::Bf16(_)) || matches!(b.data, Data::Bf16(_));
    for i in 0..m {
        for j in 0..n {
            let product = |p: usize| at(&a, i, p, rounded) * at(&b, p, j, rounded);
            let mut value = f64::from(scale) * (0..k).map(product).sum::<f64>();
            if let Some(bias) = epilogue.bias {
                value += get(bias, j);
            }
            if let Some(before) = &mut epilogue.gelu {
                set(before, i * n + j, value);
                value = super::gelu::forward(value);
            }
            if let Some(residual) = epilogue.residual {
                value += get(residual, i * n + j);
            }
            let place = i * out_stride + j;
            if accumulate {
                value += match &out {
                    DataMut::F32(out) => f64::from(out[place]),
                    DataMut::Bf16(out) => f64::from(out[place].as_f32()),
                };
            }
            set(&mut out, place, value);
        }
    }
}

fn at(matrix: &Matrix<'_>, row: usize, col: usize, rounded: bool) -> f64 {
    let index =
        if matrix.transposed { col * matrix.stride + row } else { row * matrix.stride + col };
    let value = get(matrix.data, index);
    if rounded { f64::from(bf16::round_from(value as f32).as_f32()) } else { value }
}

fn get(data: Data<'_>, index: usize) -> f64 {
    match data {
        Data::F32(values) => f64::from(values[index]),
        Data::Bf16(values) => f64::from(values[index].as_f32()),
    }
}

fn set(data: &mut DataMut<'_>, index: usize, value: f64) {
    match data {
        DataMut::F32(values) => values[index] = value as f32,
        DataMut::Bf16(values) => values[index] = bf16::round_from(value as f32),
    }
}
