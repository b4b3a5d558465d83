//! Copies, sums, casts, random numbers.

use std::ops::Range;

use half::bf16;

use super::{Device, OpClass, with_float};
use crate::cpu::dropout::{self, Dropout};
use crate::cpu::elementwise::{self, Columns};
use crate::cpu::random::{self, Key};
use crate::cpu::reduce;
use crate::{Dtype, View, ViewMut};

impl Device {
    /// Every element becomes `value`.
    pub fn fill(&self, to: ViewMut<'_>, value: f32) {
        self.on_cpu(OpClass::Elementwise, |cpu| match to.dtype() {
            Dtype::F32 => elementwise::fill::<f32>(cpu, to.host(), value),
            Dtype::Bf16 => elementwise::fill::<bf16>(cpu, to.host(), bf16::from_f32(value)),
            Dtype::U32 => elementwise::fill::<u32>(cpu, to.host(), value as u32),
            dtype => panic!("tensors are f32, bf16 or u32, not {dtype}"),
        })
    }

    /// Elements of one type.
    pub fn copy(&self, from: View<'_>, to: ViewMut<'_>) {
        self.on_cpu(OpClass::Elementwise, |cpu| match from.dtype() {
            Dtype::F32 => elementwise::copy::<f32>(cpu, from.host(), to.host()),
            Dtype::Bf16 => elementwise::copy::<bf16>(cpu, from.host(), to.host()),
            Dtype::U32 => elementwise::copy::<u32>(cpu, from.host(), to.host()),
            dtype => panic!("tensors are f32, bf16 or u32, not {dtype}"),
        })
    }

    /// Columns `first..` of `from`, as many as `to` has.
    pub fn copy_columns(&self, from: View<'_>, first: usize, to: ViewMut<'_>) {
        let width = to.cols();
        self.place_columns(from, first..first + width, to, 0);
    }

    /// Some columns of `from`, over those of `to` that begin at `at`; from f32 to bf16 or back on the way.
    pub fn place_columns(&self, from: View<'_>, columns: Range<usize>, to: ViewMut<'_>, at: usize) {
        let (source, target, columns) = (from.dtype(), to.dtype(), placed(&from, columns, &to, at));
        with_float!(source, A => with_float!(target, B => self.on_cpu(OpClass::Elementwise, |cpu| {
            elementwise::copy_columns::<A, B>(cpu, from.host(), to.host(), &columns)
        })))
    }

    /// The same, added to what is there.
    pub fn add_columns(&self, from: View<'_>, columns: Range<usize>, to: ViewMut<'_>, at: usize) {
        let (source, target, columns) = (from.dtype(), to.dtype(), placed(&from, columns, &to, at));
        with_float!(source, A => with_float!(target, B => self.on_cpu(OpClass::Elementwise, |cpu| {
            elementwise::add_columns::<A, B>(cpu, from.host(), to.host(), &columns)
        })))
    }

    /// From f32 to bf16 or back.
    pub fn cast(&self, from: View<'_>, to: ViewMut<'_>) {
        let (source, target) = (from.dtype(), to.dtype());
        with_float!(source, A => with_float!(target, B => self.on_cpu(OpClass::Elementwise, |cpu| {
            elementwise::cast::<A, B>(cpu, from.host(), to.host())
        })))
    }

    /// `a += b`
    pub fn add(&self, a: ViewMut<'_>, b: View<'_>) {
        with_float!(b.dtype(), E => self.on_cpu(OpClass::Elementwise, |cpu| {
            elementwise::add::<E, E>(cpu, a.host(), b.host())
        }))
    }

    /// The sum of the rows of `x`, in f32: a bias's gradient.
    pub fn column_sums(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Elementwise, |cpu| {
            reduce::column_sums::<E>(cpu, x.host(), out.host(), accumulate)
        }))
    }

    /// Normal random numbers: element i is a function of (seed, stream, first + i).
    pub fn normal(&self, out: ViewMut<'_>, seed: u64, stream: u64, first: u64, std: f32) {
        with_float!(out.dtype(), E => self.on_cpu(OpClass::Elementwise, |cpu| {
            random::normal::<E>(cpu, Key { seed, stream }, first, out.host(), std)
        }))
    }

    /// Sets elements to zero with this probability and scales the others up; which, is a function of (seed,
    /// stream, first + i). The backward pass is the same act on the gradient.
    pub fn dropout(&self, x: ViewMut<'_>, probability: f32, seed: u64, stream: u64, first: u64) {
        let drop = Dropout::run(Key { seed, stream }, probability, first, x.len());
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Elementwise, |cpu| {
            dropout::apply::<E>(cpu, &drop, x.host())
        }))
    }

    /// The same where rows of the whole are spread out: elements of each of `x`'s rows lie side by side in the
    /// whole, and the next row begins `stride` further on.
    pub fn dropout_rows(
        &self,
        x: ViewMut<'_>,
        probability: f32,
        (seed, stream): (u64, u64),
        first: u64,
        stride: u64,
    ) {
        let key = Key { seed, stream };
        let drop = Dropout { key, p: probability, first, width: x.cols().max(1), stride };
        with_float!(x.dtype(), E => self.on_cpu(OpClass::Elementwise, |cpu| {
            dropout::apply::<E>(cpu, &drop, x.host())
        }))
    }
}

fn placed(from: &View<'_>, columns: Range<usize>, to: &ViewMut<'_>, at: usize) -> Columns {
    let (from_stride, to_stride) = (from.cols(), to.cols());
    Columns { from_stride, from: columns.start, to_stride, to: at, width: columns.len() }
}
