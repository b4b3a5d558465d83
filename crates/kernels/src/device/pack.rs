//! Packing what travels to other ranks. Over slices of the host's memory, from which its network sends.

use super::{Device, OpClass};
use crate::cpu::pack::{self, Code};
use crate::cpu::{elementwise, largest};

impl Device {
    /// Packs `x + error`; `error` becomes what packing lost.
    pub fn pack(&self, code: Code, x: &[f32], error: &mut [f32], packed: &mut [u8]) {
        self.on_cpu(OpClass::Elementwise, |cpu| pack::pack(cpu, code, x, error, packed))
    }

    /// `out =` what was packed.
    pub fn unpack(&self, code: Code, packed: &[u8], out: &mut [f32]) {
        self.on_cpu(OpClass::Elementwise, |cpu| pack::unpack(cpu, code, packed, out))
    }

    /// `out +=` what was packed.
    pub fn add_unpacked(&self, code: Code, packed: &[u8], out: &mut [f32]) {
        self.on_cpu(OpClass::Elementwise, |cpu| pack::add_unpacked(cpu, code, packed, out))
    }

    /// Adds `x` to `kept`, and takes the largest elements out of it, beside what is usual in their places: as many as
    /// `pairs` has room for, each as its place (u32) and the number (f32). `squares` are means of the squares of
    /// what was taken before, and `room` is as long as they are.
    pub fn take_unusual(
        &self,
        x: &[f32],
        kept: &mut [f32],
        squares: &mut [f32],
        room: &mut [f32],
        pairs: &mut [u8],
    ) {
        self.on_cpu(OpClass::Elementwise, |cpu| {
            elementwise::add(cpu, kept, x);
            largest::take_unusual(cpu, kept, squares, room, pairs);
        })
    }

    /// Means of squares follow `x`, of which all was taken.
    pub fn follow_squares(&self, x: &[f32], squares: &mut [f32]) {
        self.on_cpu(OpClass::Elementwise, |cpu| largest::follow(cpu, x, squares))
    }
}
