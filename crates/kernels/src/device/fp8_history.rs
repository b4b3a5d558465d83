//! Delayed scales of fp8 matrices: the scale of a step comes from the largest elements in the steps before, so that a
//! cast reads its matrix once. A matrix that is cast for the first time takes its current scale.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use super::{Backend, Device, Fp8Format, OpClass};
use crate::cuda::fp8;
use crate::{Dtype, Tag, Tensor};

/// Steps whose largest elements count.
const LENGTH: usize = 16;

/// Inverse scale, scale, largest absolute value in this step, largest number of the format, and the largest absolute
/// values of earlier steps.
const SLOT: usize = 4 + LENGTH;

/// Largest elements of matrices in the last steps, and the scales for this step. They are not part of a checkpoint.
pub struct Fp8History(Mutex<Table>);

struct Table {
    /// (matrices, SLOT), f32
    slots: Tensor,
    /// The row of each matrix, in the order of first use.
    rows: HashMap<u64, usize>,
    /// Rows that have a scale from an earlier step.
    ready: usize,
    /// Steps since the last reset.
    steps: usize,
}

/// Where the cast of a matrix finds its scale.
pub(crate) struct SlotPlace {
    pub address: u64,
    /// Whether it has a scale.
    pub ready: bool,
}

impl Fp8History {
    /// For at most this many matrices.
    pub fn new(device: &Device, matrices: usize) -> Fp8History {
        let slots = device.zeros(matrices, SLOT, Dtype::F32, Tag::Buffers);
        Fp8History(Mutex::new(Table { slots, rows: HashMap::new(), ready: 0, steps: 0 }))
    }

    /// Forgets all steps: the next one takes current scales.
    pub fn reset(&self, device: &Device) {
        let mut table = self.lock();
        device.fill(table.slots.view_mut(), 0.0);
        table.rows.clear();
        (table.ready, table.steps) = (0, 0);
    }

    /// Ends a step: computes the scales of the next one.
    pub fn advance(&self, device: &Device) {
        let mut table = self.lock();
        let at = table.steps % LENGTH;
        table.steps += 1;
        table.ready = table.rows.len();
        let slots = table.slots.view_mut();
        device.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(_) => slots.host().chunks_mut(SLOT).for_each(|slot| next_scale(slot, at)),
            Backend::Cuda(cuda) => fp8::next_scales(cuda, slots, at),
        });
    }

    /// The slot of a matrix on a GPU, which is assigned and given its format at the first use.
    pub(crate) fn place(&self, device: &Device, key: u64, format: Fp8Format) -> SlotPlace {
        let mut table = self.lock();
        let (row, ready) = table.row(key);
        let mut slot = table.slots.view_mut().rows_of(row..row + 1);
        if !ready {
            device.fill(slot.reborrow().part(0..2), 1.0);
            device.fill(slot.reborrow().part(3..4), format.max());
        }
        SlotPlace { address: slot.address(), ready }
    }

    /// As the cast of a GPU, for a matrix with this largest element. None if there is no scale yet.
    pub(super) fn emulate(&self, key: u64, format: Fp8Format, amax: f32) -> Option<[f32; 2]> {
        let mut table = self.lock();
        let (row, ready) = table.row(key);
        let slot: &mut [f32] = table.slots.view_mut().rows_of(row..row + 1).host();
        if !ready {
            (slot[0], slot[1], slot[3]) = (1.0, 1.0, format.max());
        }
        slot[2] = slot[2].max(amax);
        ready.then_some([slot[0], slot[1]])
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Table {
    fn row(&mut self, key: u64) -> (usize, bool) {
        let (next, most) = (self.rows.len(), self.slots.rows());
        let row = *self.rows.entry(key).or_insert(next);
        assert!(row < most, "more than {most} fp8 matrices");
        (row, row < self.ready)
    }
}

fn next_scale(slot: &mut [f32], at: usize) {
    slot[4 + at] = std::mem::take(&mut slot[2]);
    let most = slot[4..].iter().fold(0.0f32, |most, x| most.max(*x));
    if most > 0.0 {
        let ratio = (slot[3] / most).min(2f32.powi(100));
        (slot[0], slot[1]) = (1.0 / ratio, ratio);
    }
}
