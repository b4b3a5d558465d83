//! Packing what travels to other ranks. Over slices of the host's memory, from which its network sends.

use super::{Device, Operation};
use crate::cpu::pack::{self, Code};
use crate::cpu::{elementwise, largest};

impl Device {
    /// Packs `x + error`; `error` becomes what packing lost.
    pub fn pack(&self, code: Code, x: &[f32], error: &mut [f32], packed: &mut [u8]) {
        self.on_cpu(Operation::Elementwise, |cpu| pack::pack(cpu, code, x, error, packed))
    }

    /// `out =` what was packed.
    pub fn unpack(&self, code: Code, packed: &[u8], out: &mut [f32]) {
        self.on_cpu(Operation::Elementwise, |cpu| pack::unpack(cpu, code, packed, out))
    }

    /// `out +=` what was packed.
    pub fn add_unpacked(&self, code: Code, packed: &[u8], out: &mut [f32]) {
        self.on_cpu(Operation::Elementwise, |cpu| pack::add_unpacked(cpu, code, packed, out))
    }

    /// Adds `x` to `kept`, and takes the elements with the largest magnitudes out of it: as many as `pairs` has
    /// room for, each as its place (u32) and the number (f32).
    pub fn take_largest(&self, x: &[f32], kept: &mut [f32], pairs: &mut [u8]) {
        self.on_cpu(Operation::Elementwise, |cpu| {
            elementwise::add(cpu, kept, x);
            largest::take_largest(cpu, kept, pairs);
        })
    }
}
