//! Fills, copies, casts and sums of elements.

use super::{Arg, Cuda, Grid, Source};
use crate::cpu::elementwise::Columns;
use crate::{Dtype, View, ViewMut};

pub(crate) const ELEMENTWISE: Source =
    Source { name: "elementwise", code: include_str!("kernels/elementwise.cu") };

/// The name of a kernel for one or two floating-point dtypes, e.g. `cast_f32_bf16`.
macro_rules! float_kernel {
    ($name:literal, $dtype:expr) => {
        match $dtype {
            $crate::Dtype::F32 => concat!($name, "_f32"),
            $crate::Dtype::Bf16 => concat!($name, "_bf16"),
            dtype => panic!("this operation takes f32 or bf16, not {dtype}"),
        }
    };
    ($name:literal, $first:expr, $second:expr) => {
        match $first {
            $crate::Dtype::F32 => float_kernel!(concat $name, "_f32", $second),
            $crate::Dtype::Bf16 => float_kernel!(concat $name, "_bf16", $second),
            dtype => panic!("this operation takes f32 or bf16, not {dtype}"),
        }
    };
    (concat $name:literal, $first:literal, $second:expr) => {
        match $second {
            $crate::Dtype::F32 => concat!($name, $first, "_f32"),
            $crate::Dtype::Bf16 => concat!($name, $first, "_bf16"),
            dtype => panic!("this operation takes f32 or bf16, not {dtype}"),
        }
    };
}
pub(super) use float_kernel;

/// Threads of a block that works on elements.
pub(super) const THREADS: u32 = 256;

/// A grid in which each thread has `each` vectors of 16 bytes.
pub(super) fn vectors(elements: usize, dtype: Dtype, each: usize) -> Grid {
    Grid::over(elements.div_ceil(each * 16 / dtype.bytes()), THREADS)
}

/// The dtype with the larger elements.
fn larger(a: Dtype, b: Dtype) -> Dtype {
    if a.bytes() < b.bytes() { b } else { a }
}

/// A grid in which each warp has a row.
pub(super) fn row_per_warp(rows: usize) -> Grid {
    Grid::new(rows.div_ceil(4), 128)
}

/// A number of elements as a kernel parameter.
pub(super) fn count(n: usize) -> Arg {
    Arg::from(n as i64)
}

/// A number that is small by its nature, such as a width in elements.
pub(super) fn small(n: usize) -> Arg {
    Arg::from(
        i32::try_from(n).unwrap_or_else(|_| panic!("{n} exceeds the range of a kernel parameter")),
    )
}

pub(super) fn flag(set: bool) -> Arg {
    Arg::from(set as i32)
}

/// The address of a tensor, or null.
pub(super) fn optional(view: Option<View<'_>>) -> Arg {
    Arg::from(view.map_or(0, |view| view.address()))
}

pub(crate) fn fill(cuda: &Cuda, to: ViewMut<'_>, value: f32) {
    let n = to.len();
    let (kernel, bits) = match to.dtype() {
        Dtype::F32 => ("fill_u32", value.to_bits()),
        Dtype::U32 => ("fill_u32", value as u32),
        Dtype::Bf16 => ("fill_u16", half::bf16::from_f32(value).to_bits() as u32),
        dtype => panic!("cannot fill a tensor of {dtype}"),
    };
    let grid = vectors(n, to.dtype(), 4);
    cuda.launch(&ELEMENTWISE, kernel, grid, &[to.into(), bits.into(), count(n)]);
}

/// Copies elements of the same dtype.
pub(crate) fn copy(cuda: &Cuda, from: View<'_>, to: ViewMut<'_>) {
    assert_eq!((from.dtype(), from.len()), (to.dtype(), to.len()), "copy of {from:?} to {to:?}");
    if !from.is_empty() {
        cuda.copy(from.address(), to.address(), from.len() * from.dtype().bytes());
    }
}

pub(crate) fn cast(cuda: &Cuda, from: View<'_>, to: ViewMut<'_>) {
    assert_eq!(from.len(), to.len(), "cast of {from:?} to {to:?}");
    if from.dtype() == to.dtype() {
        return copy(cuda, from, to);
    }
    let n = from.len();
    let kernel = match (from.dtype(), to.dtype()) {
        (Dtype::F32, Dtype::Bf16) => "cast_f32_bf16",
        (Dtype::Bf16, Dtype::F32) => "cast_bf16_f32",
        (from, to) => panic!("cannot convert {from} to {to}"),
    };
    cuda.launch(
        &ELEMENTWISE,
        kernel,
        vectors(n, Dtype::F32, 4),
        &[from.into(), to.into(), count(n)],
    );
}

/// `a += b`
pub(crate) fn add(cuda: &Cuda, a: ViewMut<'_>, b: View<'_>) {
    assert_eq!(a.len(), b.len(), "{a:?} += {b:?}");
    let (n, kernel) = (a.len(), float_kernel!("add", a.dtype(), b.dtype()));
    let grid = vectors(n, larger(a.dtype(), b.dtype()), 2);
    cuda.launch(&ELEMENTWISE, kernel, grid, &[a.into(), b.into(), count(n)]);
}

/// Adds `b`, one row, to every row of `a`.
pub(crate) fn add_to_rows(cuda: &Cuda, a: ViewMut<'_>, b: View<'_>) {
    assert_eq!(a.cols(), b.len(), "{b:?} added to the rows of {a:?}");
    let (rows, width) = (a.rows(), a.cols());
    let grid = vectors(a.len(), larger(a.dtype(), b.dtype()), 2);
    let kernel = float_kernel!("add_to_rows", a.dtype(), b.dtype());
    let args = [a.into(), b.into(), count(rows), count(width)];
    cuda.launch(&ELEMENTWISE, kernel, grid, &args);
}

pub(crate) fn place_columns(cuda: &Cuda, from: View<'_>, to: ViewMut<'_>, columns: &Columns) {
    let kernel = float_kernel!("place_columns", from.dtype(), to.dtype());
    launch_columns(cuda, kernel, from, to, columns);
}

pub(crate) fn add_columns(cuda: &Cuda, from: View<'_>, to: ViewMut<'_>, columns: &Columns) {
    let kernel = float_kernel!("add_columns", from.dtype(), to.dtype());
    launch_columns(cuda, kernel, from, to, columns);
}

fn launch_columns(
    cuda: &Cuda,
    kernel: &'static str,
    from: View<'_>,
    to: ViewMut<'_>,
    columns: &Columns,
) {
    let Columns { from_stride, from: first, to_stride, to: at, width } = *columns;
    assert!(
        width > 0 && first + width <= from_stride && at + width <= to_stride,
        "{width} columns from {first} of {from_stride} to {at} of {to_stride}"
    );
    assert_eq!(from.rows(), to.rows(), "rows differ");
    let rows = to.rows();
    let grid = vectors(rows * width, larger(from.dtype(), to.dtype()), 2);
    let start = |address: u64, column: usize, dtype: Dtype| {
        Arg::from(address + (column * dtype.bytes()) as u64)
    };
    let (from, to) =
        (start(from.address(), first, from.dtype()), start(to.address(), at, to.dtype()));
    let args = [from, to, count(rows), count(from_stride), count(to_stride), count(width)];
    cuda.launch(&ELEMENTWISE, kernel, grid, &args);
}
