//! Element-wise casts, sums and scaling, each in one pass over memory.

use super::Cpu;
use super::partition::{GRAIN_SIZE, by_rows, parallel_for};
use super::simd::multiversion;
use crate::{Element, Float};

/// `to = from`, rounded to nearest if the type is smaller.
pub fn cast<A: Float, B: Float>(cpu: &Cpu, from: &[A], to: &mut [B]) {
    assert_eq!(from.len(), to.len());
    parallel_for(&cpu.team, to.len(), GRAIN_SIZE, by_rows(to, 1), |range, to| {
        cast_part(cpu.level, &from[range], to)
    });
}

pub fn copy<E: Element>(cpu: &Cpu, from: &[E], to: &mut [E]) {
    assert_eq!(from.len(), to.len());
    parallel_for(&cpu.team, to.len(), GRAIN_SIZE, by_rows(to, 1), |range, to| {
        to.copy_from_slice(&from[range])
    });
}

pub fn fill<E: Element>(cpu: &Cpu, to: &mut [E], value: E) {
    parallel_for(&cpu.team, to.len(), GRAIN_SIZE, by_rows(to, 1), |_, to| to.fill(value));
}

/// `a += b`.
pub fn add<A: Float, B: Float>(cpu: &Cpu, a: &mut [A], b: &[B]) {
    assert_eq!(a.len(), b.len());
    parallel_for(&cpu.team, b.len(), GRAIN_SIZE, by_rows(a, 1), |range, a| {
        add_part(cpu.level, a, &b[range])
    });
}

/// Source and destination columns of a copy between matrices with equal numbers of rows.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Row stride of the source, and the first column to read.
    pub from_stride: usize,
    pub from: usize,
    /// Row stride of the destination, and the first column to write.
    pub to_stride: usize,
    pub to: usize,
    pub width: usize,
}

/// Copies columns of one matrix to another, rounded to its type.
///
/// # Panics
/// If the numbers of rows differ, or columns are out of range.
pub fn copy_columns<A: Float, B: Float>(cpu: &Cpu, from: &[A], to: &mut [B], columns: &Columns) {
    by_row(cpu, from, to, columns, |from, to| cast_part(cpu.level, from, to));
}

/// Adds columns of one matrix to those of another.
///
/// # Panics
/// As `copy_columns`.
pub fn add_columns<A: Float, B: Float>(cpu: &Cpu, from: &[A], to: &mut [B], columns: &Columns) {
    by_row(cpu, from, to, columns, |from, to| add_part(cpu.level, to, from));
}

fn by_row<A: Float, B: Float>(
    cpu: &Cpu,
    from: &[A],
    to: &mut [B],
    columns: &Columns,
    work: impl Fn(&[A], &mut [B]) + Sync,
) {
    let Columns { from_stride, from: first, to_stride, to: at, width } = *columns;
    assert!(
        width > 0 && first + width <= from_stride && at + width <= to_stride,
        "{width} columns from {first} of {from_stride} to {at} of {to_stride}"
    );
    let rows = to.len() / to_stride;
    assert_eq!((from.len(), to.len()), (rows * from_stride, rows * to_stride), "rows differ");
    parallel_for(
        &cpu.team,
        rows,
        super::partition::grain_rows(width),
        by_rows(to, to_stride),
        |range, to| {
            let from =
                from[range.start * from_stride..range.end * from_stride].chunks_exact(from_stride);
            for (from, to) in from.zip(to.chunks_exact_mut(to_stride)) {
                work(&from[first..first + width], &mut to[at..at + width]);
            }
        },
    );
}

multiversion! {
    fn cast_part<I, A: Float, B: Float>(from: &[A], to: &mut [B]) {
        let n = to.len();
        let from = &from[..n];
        for i in 0..n {
            to[i] = B::round_from(from[i].as_f32());
        }
    }

    fn add_part<I, A: Float, B: Float>(a: &mut [A], b: &[B]) {
        let n = a.len();
        let b = &b[..n];
        for i in 0..n {
            a[i] = A::round_from(a[i].as_f32() + b[i].as_f32());
        }
    }
}
