//! Helpers: tensors on the device under test, and comparisons of results with references.

use std::sync::{Mutex, MutexGuard};

use lockstep_kernels::{Device, Element, Float, Tag, Tensor, View, ViewMut};

#[path = "../common/mod.rs"]
mod common;
pub use common::*;

/// Devices under test that no test uses now. A device computes for one thread at a time.
static IDLE: Mutex<Vec<Device>> = Mutex::new(vec![]);

/// The device of a test's thread, for the next test afterwards.
struct Lease(Device);

impl Drop for Lease {
    fn drop(&mut self) {
        idle().push(self.0.clone());
    }
}

thread_local! {
    static LEASE: Lease = Lease({
        let idle = idle().pop();
        idle.unwrap_or_else(|| Device::from_env(2))
    });
}

fn idle() -> MutexGuard<'static, Vec<Device>> {
    IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The device under test.
pub fn device() -> Device {
    LEASE.with(|lease| lease.0.clone())
}

/// Lengths with all kinds of vector remainders, and one with many blocks.
pub const LENGTHS: [usize; 7] = [0, 1, 7, 17, 1000, 20_003, 300_001];

/// (rows, width) with the same properties: widths for a warp, a block, and beyond what threads keep in registers.
pub const SHAPES: [(usize, usize); 10] = [
    (0, 8),
    (1, 1),
    (7, 17),
    (17, 1000),
    (1000, 7),
    (301, 128),
    (64, 200),
    (6, 1031),
    (5, 4096),
    (3, 17_000),
];

/// Offsets of views in their tensors, in elements: one that allows vector accesses and one that does not.
pub const OFFSETS: [usize; 2] = [0, 1];

/// A matrix on the device, at some offset of a tensor.
pub struct Data {
    tensor: Tensor,
    offset: usize,
    rows: usize,
    cols: usize,
}

impl Data {
    pub fn new<E: Element>(offset: usize, (rows, cols): (usize, usize), values: &[E]) -> Data {
        assert_eq!(values.len(), rows * cols);
        let tensor = device().empty(1, offset + rows * cols, E::DTYPE, Tag::Buffers);
        let mut data = Data { tensor, offset, rows, cols };
        device().write(data.view_mut(), values);
        data
    }

    /// One row.
    pub fn row<E: Element>(offset: usize, values: &[E]) -> Data {
        Data::new(offset, (1, values.len()), values)
    }

    pub fn view(&self) -> View<'_> {
        let (from, to) = (self.offset, self.offset + self.rows * self.cols);
        self.tensor.view().part(from..to).shaped(self.rows, self.cols)
    }

    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let (from, to) = (self.offset, self.offset + self.rows * self.cols);
        self.tensor.view_mut().part(from..to).shaped(self.rows, self.cols)
    }

    pub fn read<E: Element>(&self) -> Vec<E> {
        let mut values = vec![E::default(); self.rows * self.cols];
        device().read(self.view(), &mut values);
        values
    }

    pub fn read_f64<E: Float>(&self) -> Vec<f64> {
        to_f64(&self.read::<E>())
    }
}

/// Integers, for comparisons next to floating-point numbers.
pub fn as_f64(x: &[u32]) -> Vec<f64> {
    x.iter().map(|x| *x as f64).collect()
}

/// Runs `work` twice: the same bits, within `tolerance` of `expected` (relative to the value, or absolute below 1).
#[track_caller]
pub fn check<const N: usize>(
    what: &str,
    tolerance: f64,
    expected: [Vec<f64>; N],
    work: impl Fn() -> [Vec<f64>; N],
) {
    let (first, second) = (work(), work());
    for (output, (first, second)) in first.iter().zip(&second).enumerate() {
        for (i, (a, b)) in first.iter().zip(second).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same, "{what}, output {output}[{i}]: {a}, and {b} the second time");
        }
        close(&format!("{what}, output {output}"), tolerance, &expected[output], first);
    }
}
