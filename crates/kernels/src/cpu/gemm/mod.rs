//! Matrix multiply: `out = epilogue(scale · a · b)`, in f32, or of bf16 values summed in f32. Knows nothing of
//! layers, and never splits a sum over threads: the bits do not depend on how many there are.
//!
//! README.md beside this file tells how the blocks travel through the caches.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod epilogue;
mod gelu;
mod grid;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod parts;
mod portable;
mod shares;
#[cfg(target_arch = "x86_64")]
mod thirds;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod vector;
mod wide;

pub use shares::Shares;

use super::Cpu;
use half::bf16;

/// Elements in f32 or bf16.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

#[derive(Debug)]
pub enum DataMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

/// A logical (rows, cols) matrix: row-major with `stride` elements from row to row; `transposed` when it
/// lies as (cols, rows).
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub data: Data<'a>,
    pub stride: usize,
    pub transposed: bool,
}

/// One multiplication. When either operand is bf16 the other is rounded to bf16 too; sums are f32 always.
/// Denormal bf16 operands may count as zero (AMX does so), and an infinite f32 operand may make NaN.
pub struct Gemm<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix<'a>,    // (m, k)
    pub b: Matrix<'a>,    // (k, n)
    pub out: DataMut<'a>, // (m, n)
    pub out_stride: usize,
    /// `out += …` instead of `out = …`: all that the epilogue made of the product is added.
    pub accumulate: bool,
    /// Of the product, before the epilogue.
    pub scale: f32,
    pub epilogue: Epilogue<'a>,
}

/// What becomes of the product before it is stored, in this order.
#[derive(Default)]
pub struct Epilogue<'a> {
    /// (n), added to each row.
    pub bias: Option<Data<'a>>,
    /// (m, n) contiguous: receives the value before GELU (its tanh form); `out` receives GELU of it.
    pub gelu: Option<DataMut<'a>>,
    /// (m, n) contiguous, added last.
    pub residual: Option<Data<'a>>,
}

/// Up to so many rows, reading `b` once as it lies beats packing it.
const FEW_ROWS: usize = 8;

/// Multiplies.
///
/// ```
/// use lockstep_kernels::cpu::{Cpu, gemm};
/// let (x, w) = ([1.0, 2.0], [10.0, 20.0, 30.0, 40.0]); // (1, 2), and (2, 2) as (out, in)
/// let mut y = [0.0; 2];
/// let plain = |data, transposed| gemm::Matrix { data: gemm::Data::F32(data), stride: 2, transposed };
/// gemm::run(&Cpu::new(1), gemm::Gemm {
///     m: 1, n: 2, k: 2,
///     a: plain(&x, false), b: plain(&w, true),
///     out: gemm::DataMut::F32(&mut y), out_stride: 2,
///     accumulate: false, scale: 1.0, epilogue: Default::default(),
/// });
/// assert_eq!(y, [50.0, 110.0]);
/// ```
///
/// # Panics
/// When a slice is too short for its shape, or a stride too small.
pub fn run(cpu: &Cpu, gemm: Gemm<'_>) {
    check(&gemm);
    let Gemm { m, n, k, a, b, out, out_stride, accumulate, scale, epilogue } = gemm;
    if m == 0 || n == 0 {
        return;
    }
    let rounded = matches!(a.data, Data::Bf16(_)) || matches!(b.data, Data::Bf16(_));
    let product = Product {
        m,
        n,
        k,
        a: Operand { data: a.data, stride: a.stride, k_runs: !a.transposed, rounded },
        b: Operand { data: b.data, stride: b.stride, k_runs: b.transposed, rounded },
        target: epilogue::Target::new(out, out_stride, accumulate, scale, epilogue, n),
    };
    if m <= FEW_ROWS {
        return vector::run(cpu, &product);
    }
    blocks::run(cpu, &kernel::Kernel::of(cpu.level, rounded), &product);
}

/// A checked multiplication, as all its members see it.
struct Product<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'a>,
    b: Operand<'a>,
    target: epilogue::Target<'a>,
}

/// One side of the product seen from its sums: `k` is the direction that is summed over, a lane is a row of
/// `a` or a column of `b`.
#[derive(Clone, Copy)]
struct Operand<'a> {
    data: Data<'a>,
    stride: usize,
    /// Elements of one lane lie side by side, and `stride` leads to the next lane. Otherwise those of one k.
    k_runs: bool,
    /// f32 elements are rounded to bf16 on the way.
    rounded: bool,
}

impl Operand<'_> {
    /// Where an element lies.
    #[inline(always)]
    fn index(&self, lane: usize, k: usize) -> usize {
        if self.k_runs { lane * self.stride + k } else { k * self.stride + lane }
    }
}

impl Data<'_> {
    pub fn len(&self) -> usize {
        match self {
            Data::F32(values) => values.len(),
            Data::Bf16(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl DataMut<'_> {
    pub fn len(&self) -> usize {
        match self {
            DataMut::F32(values) => values.len(),
            DataMut::Bf16(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Everything the kernels believe about the slices; they check nothing themselves.
fn check(gemm: &Gemm<'_>) {
    let (m, n, k) = (gemm.m, gemm.n, gemm.k);
    let lies = |name: &str, rows: usize, cols: usize, stride: usize, len: usize| {
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(
            stride >= cols || rows == 1,
            "{name}: rows of {cols} do not fit in a stride of {stride}"
        );
        let need = (rows - 1) * stride + cols;
        assert!(
            len >= need,
            "{name}: ({rows}, {cols}) with stride {stride} needs {need} elements, not {len}"
        );
    };
    let operand = |name: &str, rows: usize, cols: usize, matrix: &Matrix<'_>| {
        let (rows, cols) = if matrix.transposed { (cols, rows) } else { (rows, cols) };
        lies(name, rows, cols, matrix.stride, matrix.data.len());
    };
    operand("a", m, k, &gemm.a);
    operand("b", k, n, &gemm.b);
    lies("out", m, n, gemm.out_stride, gemm.out.len());
    if let Some(bias) = &gemm.epilogue.bias {
        lies("bias", 1, n, n, bias.len());
    }
    if let Some(before) = &gemm.epilogue.gelu {
        lies("gelu", m, n, n, before.len());
    }
    if let Some(residual) = &gemm.epilogue.residual {
        lies("residual", m, n, n, residual.len());
    }
}
