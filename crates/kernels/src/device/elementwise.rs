//! Copies, sums, casts, random numbers.

use half::bf16;

use super::{Device, Operation, with_float};
use crate::cpu::dropout::{self, Dropout};
use crate::cpu::random::{self, Key};
use crate::cpu::{elementwise, reduce};
use crate::{Dtype, View, ViewMut};

impl Device {
    /// Every element becomes `value`.
    pub fn fill(&self, to: ViewMut<'_>, value: f32) {
        self.on_cpu(Operation::Elementwise, |cpu| match to.dtype() {
            Dtype::F32 => elementwise::fill::<f32>(cpu, to.host(), value),
            Dtype::Bf16 => elementwise::fill::<bf16>(cpu, to.host(), bf16::from_f32(value)),
            Dtype::U32 => elementwise::fill::<u32>(cpu, to.host(), value as u32),
        })
    }

    /// Elements of one type.
    pub fn copy(&self, from: View<'_>, to: ViewMut<'_>) {
        self.on_cpu(Operation::Elementwise, |cpu| match from.dtype() {
            Dtype::F32 => elementwise::copy::<f32>(cpu, from.host(), to.host()),
            Dtype::Bf16 => elementwise::copy::<bf16>(cpu, from.host(), to.host()),
            Dtype::U32 => elementwise::copy::<u32>(cpu, from.host(), to.host()),
        })
    }

    /// Columns `first..` of `from`, as many as `to` has.
    pub fn copy_columns(&self, from: View<'_>, first: usize, to: ViewMut<'_>) {
        let (stride, width) = (from.cols(), to.cols());
        assert!(
            from.rows() == to.rows() && first + width <= stride,
            "columns {first}.. of {stride}"
        );
        with_float!(from.dtype(), E => self.on_cpu(Operation::Elementwise, |_| {
            let rows = from.host::<E>().chunks_exact(stride);
            for (from, to) in rows.zip(to.host::<E>().chunks_exact_mut(width)) {
                to.copy_from_slice(&from[first..first + width]);
            }
        }))
    }

    /// From f32 to bf16 or back.
    pub fn cast(&self, from: View<'_>, to: ViewMut<'_>) {
        let (source, target) = (from.dtype(), to.dtype());
        with_float!(source, A => with_float!(target, B => self.on_cpu(Operation::Elementwise, |cpu| {
            elementwise::cast::<A, B>(cpu, from.host(), to.host())
        })))
    }

    /// `a += b`
    pub fn add(&self, a: ViewMut<'_>, b: View<'_>) {
        with_float!(b.dtype(), E => self.on_cpu(Operation::Elementwise, |cpu| {
            elementwise::add::<E, E>(cpu, a.host(), b.host())
        }))
    }

    /// The sum of the rows of `x`, in f32: a bias's gradient.
    pub fn column_sums(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        with_float!(x.dtype(), E => self.on_cpu(Operation::Elementwise, |cpu| {
            reduce::column_sums::<E>(cpu, x.host(), out.host(), accumulate)
        }))
    }

    /// Normal random numbers: element i is a function of (seed, stream, first + i).
    pub fn normal(&self, out: ViewMut<'_>, seed: u64, stream: u64, first: u64, std: f32) {
        with_float!(out.dtype(), E => self.on_cpu(Operation::Elementwise, |cpu| {
            random::normal::<E>(cpu, Key { seed, stream }, first, out.host(), std)
        }))
    }

    /// Sets elements to zero with this probability and scales the others up; which, is a function of (seed,
    /// stream, first + i). The backward pass is the same act on the gradient.
    pub fn dropout(&self, x: ViewMut<'_>, probability: f32, seed: u64, stream: u64, first: u64) {
        let drop = Dropout::run(Key { seed, stream }, probability, first, x.len());
        with_float!(x.dtype(), E => self.on_cpu(Operation::Elementwise, |cpu| {
            dropout::apply::<E>(cpu, &drop, x.host())
        }))
    }
}
