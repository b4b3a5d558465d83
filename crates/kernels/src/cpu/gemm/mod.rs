//! Matrix multiply: `out = epilogue(scale · a · b)`, in f32, or of bf16 values accumulated in f32. Knows nothing
//! about layers, and never splits k over threads: the bits do not depend on the number of threads.
//!
//! README.md in this folder describes the blocking.

#[cfg(target_arch = "x86_64")]
mod amx_bf16;
#[cfg(target_arch = "x86_64")]
mod amx_bf16x3;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocking;
mod blocks;
mod epilogue;
mod gelu;
mod grid;
mod kernel;
mod load_balance;
mod masked_vector;
#[cfg(target_arch = "x86_64")]
mod pack_avx512;
#[cfg(target_arch = "x86_64")]
mod pack_bf16;
#[cfg(target_arch = "x86_64")]
mod pack_bf16x3;
mod pack_f32;
mod panel;
mod portable;
mod small_m;
#[cfg(target_arch = "x86_64")]
mod transpose;

pub use load_balance::LoadBalancer;

use super::Cpu;
use half::bf16;
use lockstep_types::SMALL_GEMM_ROWS;

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

/// A logical (rows, cols) matrix: row-major with `stride` elements between rows; `transposed` if it is stored
/// as (cols, rows).
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub data: Data<'a>,
    pub stride: usize,
    pub transposed: bool,
}

/// One multiplication. If either operand is bf16, the other is rounded to bf16; accumulation is always f32.
/// Denormal bf16 operands may be treated as zero (AMX does so), and an infinite f32 operand may produce NaN.
pub struct Gemm<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix<'a>,    // (m, k)
    pub b: Matrix<'a>,    // (k, n)
    pub out: DataMut<'a>, // (m, n)
    pub out_stride: usize,
    /// `out += …` instead of `out = …`; the result of the epilogue is added.
    pub accumulate: bool,
    /// Factor of the product, applied before the epilogue.
    pub scale: f32,
    pub epilogue: Epilogue<'a>,
}

/// Operations on the product before it is stored, in this order.
#[derive(Default)]
pub struct Epilogue<'a> {
    /// (n), added to each row.
    pub bias: Option<Data<'a>>,
    /// (m, n) contiguous: receives the input of GELU (tanh form); `out` receives its output.
    pub gelu: Option<DataMut<'a>>,
    /// (m, n) contiguous, added last.
    pub residual: Option<Data<'a>>,
}

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
    if gemm.m == 0 || gemm.n == 0 {
        return;
    }
    let product = Product::new(gemm);
    // With few rows, reading `b` once is faster than packing it.
    if product.m <= SMALL_GEMM_ROWS {
        return small_m::run(cpu, &product);
    }
    let kernel = kernel::MicroKernel::select(cpu.level, product.a.round_to_bf16);
    blocks::run(cpu, &kernel, &product);
}

/// A checked multiplication, as its threads see it.
struct Product<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: Operand<'a>,
    b: Operand<'a>,
    output: epilogue::Output<'a>,
}

impl<'a> Product<'a> {
    fn new(gemm: Gemm<'a>) -> Product<'a> {
        let Gemm { m, n, k, a, b, out, out_stride, accumulate, scale, epilogue } = gemm;
        let round_to_bf16 = matches!(a.data, Data::Bf16(_)) || matches!(b.data, Data::Bf16(_));
        let operand = |matrix: Matrix<'a>, k_contiguous| Operand {
            data: matrix.data,
            stride: matrix.stride,
            k_contiguous,
            round_to_bf16,
        };
        let output = epilogue::Output {
            out: out.into(),
            out_stride,
            accumulate,
            scale,
            bias: epilogue.bias,
            gelu_input: epilogue.gelu.map(Into::into),
            residual: epilogue.residual,
            n,
        };
        let (a, b) = (operand(a, !a.transposed), operand(b, b.transposed));
        Product { m, n, k, a, b, output }
    }
}

/// One operand as (outer, k): k is the dimension that is summed over, the outer dimension is that of the rows of
/// `a` or of the columns of `b`.
#[derive(Clone, Copy)]
struct Operand<'a> {
    data: Data<'a>,
    stride: usize,
    /// Elements along k are contiguous, and `stride` is that of the outer dimension; otherwise the reverse.
    k_contiguous: bool,
    /// f32 elements are rounded to bf16 when they are read.
    round_to_bf16: bool,
}

impl Operand<'_> {
    #[inline(always)]
    fn index(&self, outer: usize, k: usize) -> usize {
        if self.k_contiguous { outer * self.stride + k } else { k * self.stride + outer }
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

/// Checks all slice lengths; the kernels do not check them again.
fn check(gemm: &Gemm<'_>) {
    let (m, n, k) = (gemm.m, gemm.n, gemm.k);
    let check_len = |name: &str, rows: usize, cols: usize, stride: usize, len: usize| {
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
        check_len(name, rows, cols, matrix.stride, matrix.data.len());
    };
    operand("a", m, k, &gemm.a);
    operand("b", k, n, &gemm.b);
    check_len("out", m, n, gemm.out_stride, gemm.out.len());
    if let Some(bias) = &gemm.epilogue.bias {
        check_len("bias", 1, n, n, bias.len());
    }
    if let Some(input) = &gemm.epilogue.gelu {
        check_len("gelu", m, n, n, input.len());
    }
    if let Some(residual) = &gemm.epilogue.residual {
        check_len("residual", m, n, n, residual.len());
    }
}
