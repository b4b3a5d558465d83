//! Fills, copies, casts and sums.

use std::ops::Range;

use half::bf16;

use super::{Backend, Device, OpClass, Scalar, with_float};
use crate::cpu::elementwise::{self, Columns};
use crate::cpu::reduce;
use crate::cuda;
use crate::{Dtype, View, ViewMut};

impl Device {
    /// Sets every element to `value`.
    pub fn fill(&self, to: ViewMut<'_>, value: f32) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => match to.dtype() {
                Dtype::F32 => elementwise::fill::<f32>(cpu, to.host(), value),
                Dtype::Bf16 => elementwise::fill::<bf16>(cpu, to.host(), bf16::from_f32(value)),
                Dtype::U32 => elementwise::fill::<u32>(cpu, to.host(), value as u32),
                dtype => panic!("cannot fill a tensor of {dtype}"),
            },
            Backend::Cuda(gpu) => cuda::elementwise::fill(gpu, to, value),
        })
    }

    /// Copies elements of the same dtype.
    pub fn copy(&self, from: View<'_>, to: ViewMut<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => match from.dtype() {
                Dtype::F32 => elementwise::copy::<f32>(cpu, from.host(), to.host()),
                Dtype::Bf16 => elementwise::copy::<bf16>(cpu, from.host(), to.host()),
                Dtype::U32 => elementwise::copy::<u32>(cpu, from.host(), to.host()),
                dtype => panic!("cannot copy a tensor of {dtype}"),
            },
            Backend::Cuda(gpu) => cuda::elementwise::copy(gpu, from, to),
        })
    }

    /// Copies the columns of `from` that start at `first`, as many as `to` has.
    pub fn copy_columns(&self, from: View<'_>, first: usize, to: ViewMut<'_>) {
        let width = to.cols();
        self.place_columns(from, first..first + width, to, 0);
    }

    /// Copies columns of `from` to the columns of `to` that start at `at`, converting the dtype.
    pub fn place_columns(&self, from: View<'_>, columns: Range<usize>, to: ViewMut<'_>, at: usize) {
        let columns = column_ranges(&from, columns, &to, at);
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(from.dtype(), A => with_float!(to.dtype(), B => {
                elementwise::copy_columns::<A, B>(cpu, from.host(), to.host(), &columns)
            })),
            Backend::Cuda(gpu) => cuda::elementwise::place_columns(gpu, from, to, &columns),
        })
    }

    /// Adds columns of `from` to the columns of `to` that start at `at`, converting the dtype.
    pub fn add_columns(&self, from: View<'_>, columns: Range<usize>, to: ViewMut<'_>, at: usize) {
        let columns = column_ranges(&from, columns, &to, at);
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(from.dtype(), A => with_float!(to.dtype(), B => {
                elementwise::add_columns::<A, B>(cpu, from.host(), to.host(), &columns)
            })),
            Backend::Cuda(gpu) => cuda::elementwise::add_columns(gpu, from, to, &columns),
        })
    }

    /// Converts between f32 and bf16.
    pub fn cast(&self, from: View<'_>, to: ViewMut<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(from.dtype(), A => with_float!(to.dtype(), B => {
                elementwise::cast::<A, B>(cpu, from.host(), to.host())
            })),
            Backend::Cuda(gpu) => cuda::elementwise::cast(gpu, from, to),
        })
    }

    /// `a += b`
    pub fn add(&self, a: ViewMut<'_>, b: View<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(b.dtype(), E => elementwise::add::<E, E>(cpu, a.host(), b.host()))
            }
            Backend::Cuda(gpu) => cuda::elementwise::add(gpu, a, b),
        })
    }

    /// Sums the rows of `x` in f32, e.g. for the gradient of a bias.
    pub fn column_sums(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => with_float!(x.dtype(), E => {
                reduce::column_sums::<E>(cpu, x.host(), out.host(), accumulate)
            }),
            Backend::Cuda(gpu) => cuda::reduce::column_sums(gpu, x, out, accumulate),
        })
    }

    /// Sum of all elements, accumulated in f64 in a fixed order.
    pub fn sum(&self, x: View<'_>) -> Scalar {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(_) => {
                let sum = x.host::<f32>().iter().fold(0.0, |sum, &x| sum + x as f64);
                Scalar::from(sum)
            }
            Backend::Cuda(gpu) => cuda::reduce::sum(gpu, x),
        })
    }

    /// Sum of the squares of all elements of all `parts`.
    pub fn sum_of_squares<'a>(&self, parts: impl IntoIterator<Item = View<'a>>) -> Scalar {
        // Not generic: the kernels are compiled here, once, and not in each crate that calls this.
        self.sum_of_squares_of(&mut parts.into_iter())
    }

    fn sum_of_squares_of<'a>(&self, parts: &mut dyn Iterator<Item = View<'a>>) -> Scalar {
        self.execute(OpClass::Optimizer, |backend| match backend {
            Backend::Cpu(cpu) => {
                let squares = |x: View<'a>| {
                    with_float!(x.dtype(), E => reduce::sum_of_squares::<E>(cpu, x.host()))
                };
                Scalar::from(parts.map(squares).sum::<f64>())
            }
            Backend::Cuda(gpu) => {
                let parts: Vec<View<'_>> = parts.collect();
                cuda::reduce::sum_of_squares(gpu, &parts)
            }
        })
    }

    /// Number of elements that are infinite or NaN. Waits for the result.
    pub fn count_non_finite(&self, x: View<'_>) -> u64 {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(x.dtype(), E => reduce::count_non_finite::<E>(cpu, x.host()))
            }
            Backend::Cuda(gpu) => cuda::reduce::count_non_finite(gpu, x),
        })
    }

    /// Checksum of the bits of all elements, the same on every device. Waits like [`Device::read`].
    pub fn checksum(&self, x: View<'_>) -> u64 {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cuda(gpu) if !x.location().is_host_accessible() => {
                cuda::reduce::checksum(gpu, x)
            }
            _ if x.dtype() == Dtype::Bf16 => {
                reduce::checksum(x.host::<bf16>().iter().map(|value| value.to_bits().into()))
            }
            _ => reduce::checksum(x.host::<f32>().iter().map(|value| value.to_bits())),
        })
    }
}

fn column_ranges(from: &View<'_>, columns: Range<usize>, to: &ViewMut<'_>, at: usize) -> Columns {
    let (from_stride, to_stride) = (from.cols(), to.cols());
    Columns { from_stride, from: columns.start, to_stride, to: at, width: columns.len() }
}
