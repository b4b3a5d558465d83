//! Compression of gradients on their way to other ranks: quantized codes, and the top-k elements as pairs of
//! index (u32) and value (f32).

use super::{Device, OpClass};
use crate::cpu::pack::{self, Code};
use crate::cpu::{elementwise, largest};
use crate::{Dtype, Tag, View, ViewMut};

impl Device {
    /// Packs `x + error`; `error` becomes the rounding error.
    pub fn pack(
        &self,
        code: Code,
        x: View<'_>,
        error: ViewMut<'_>,
        packed: ViewMut<'_>, // (code.bytes(len)), u8
    ) {
        self.on_cpu(OpClass::Elementwise, |cpu| {
            pack::pack(cpu, code, x.host(), error.host(), packed.host())
        })
    }

    /// `out =` the unpacked numbers.
    pub fn unpack(&self, code: Code, packed: View<'_>, out: ViewMut<'_>) {
        self.on_cpu(OpClass::Elementwise, |cpu| pack::unpack(cpu, code, packed.host(), out.host()))
    }

    /// `out +=` the unpacked numbers.
    pub fn add_unpacked(&self, code: Code, packed: View<'_>, out: ViewMut<'_>) {
        self.on_cpu(OpClass::Elementwise, |cpu| {
            pack::add_unpacked(cpu, code, packed.host(), out.host())
        })
    }

    /// Adds `x` to `residual` and moves its k largest elements, relative to the root mean square of what was taken
    /// from the same place before, into `pairs`. `squares` holds these means and is updated.
    pub fn take_topk(
        &self,
        x: View<'_>,
        mut residual: ViewMut<'_>,
        squares: ViewMut<'_>,
        pairs: ViewMut<'_>, // (k * PAIR), u8
    ) {
        let mut ratios = self.empty(1, x.len(), Dtype::F32, Tag::Buffers);
        self.on_cpu(OpClass::Elementwise, |cpu| {
            elementwise::add::<f32, f32>(cpu, residual.reborrow().host(), x.host());
            let ratios = ratios.view_mut().host();
            largest::take_unusual(cpu, residual.host(), squares.host(), ratios, pairs.host());
        })
    }

    /// Updates the means of squares with `x`, all of which was sent.
    pub fn follow_squares(&self, x: View<'_>, squares: ViewMut<'_>) {
        self.on_cpu(OpClass::Elementwise, |cpu| largest::follow(cpu, x.host(), squares.host()))
    }

    /// Adds pairs to `out`, whose first element has the index `first`.
    pub fn add_pairs(&self, pairs: View<'_>, first: usize, out: ViewMut<'_>) {
        self.on_cpu(OpClass::Elementwise, |_| largest::add_pairs(pairs.host(), first, out.host()))
    }

    /// The number of pairs whose index is below `index`, after everything before it is done. Pairs are in the
    /// order of their indices.
    pub fn pairs_below(&self, pairs: View<'_>, index: usize) -> usize {
        self.on_cpu(OpClass::Elementwise, |_| largest::pairs_below(pairs.host(), index))
    }
}
