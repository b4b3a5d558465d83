//! Compression of gradients on their way to other ranks: quantized codes, and the top-k elements as pairs of index
//! (u32) and value (f32).

use super::{Backend, Device, OpClass};
use crate::cpu::{elementwise, quantize, top_k};
use crate::cuda;
use crate::{Dtype, Tag, View, ViewMut};

/// Elements that share a scale: 1 KiB of f32, which stays in the L1 cache between the two passes over it.
pub(crate) const SCALE_CHUNK: usize = 256;

/// Format of quantized numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Code {
    Bf16,
    /// f16 times a power of two per chunk, because gradients are often too small for the exponent of f16.
    F16,
    /// -127 to 127, times a scale per chunk: max|x| / 127.
    Int8,
}

impl Code {
    /// Bytes of `n` packed numbers: the scales of their chunks, then the codes.
    pub const fn bytes(self, n: usize) -> usize {
        self.scale_bytes() * n.div_ceil(SCALE_CHUNK) + self.code_bytes() * n
    }

    pub(crate) const fn scale_bytes(self) -> usize {
        match self {
            Code::Bf16 => 0,
            Code::F16 | Code::Int8 => 4,
        }
    }

    pub(crate) const fn code_bytes(self) -> usize {
        match self {
            Code::Bf16 | Code::F16 => 2,
            Code::Int8 => 1,
        }
    }
}

impl Device {
    /// Packs `x + error`; `error` becomes the rounding error.
    pub fn pack(
        &self,
        code: Code,
        x: View<'_>,
        error: ViewMut<'_>,
        packed: ViewMut<'_>, // (code.bytes(len)), u8
    ) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => {
                quantize::quantize(cpu, code, x.host(), error.host(), packed.host())
            }
            Backend::Cuda(gpu) => cuda::pack::pack(gpu, code, x, error, packed),
        })
    }

    /// `out =` the unpacked numbers.
    pub fn unpack(&self, code: Code, packed: View<'_>, out: ViewMut<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => quantize::dequantize(cpu, code, packed.host(), out.host()),
            Backend::Cuda(gpu) => cuda::pack::unpack(gpu, code, packed, out),
        })
    }

    /// `out +=` the unpacked numbers.
    pub fn add_unpacked(&self, code: Code, packed: View<'_>, out: ViewMut<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => quantize::dequantize_add(cpu, code, packed.host(), out.host()),
            Backend::Cuda(gpu) => cuda::pack::add_unpacked(gpu, code, packed, out),
        })
    }

    /// Adds `x` to `residual` and moves its k largest elements, relative to the root mean square of what was taken
    /// from the same place before, into `pairs`. `squares` holds these means and is updated.
    pub fn take_topk(
        &self,
        x: View<'_>,
        mut residual: ViewMut<'_>,
        squares: ViewMut<'_>,
        pairs: ViewMut<'_>, // (k * PAIR_BYTES), u8
    ) {
        let mut ratios = self.empty(1, x.len(), Dtype::F32, Tag::Buffers);
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => {
                elementwise::add::<f32, f32>(cpu, residual.reborrow().host(), x.host());
                let ratios = ratios.view_mut().host();
                top_k::take_top_k_normalized(
                    cpu,
                    residual.host(),
                    squares.host(),
                    ratios,
                    pairs.host(),
                );
            }
            Backend::Cuda(gpu) => {
                let ratios = ratios.view_mut();
                cuda::pack::take_topk(gpu, cuda::pack::TopK { x, residual, squares, ratios, pairs })
            }
        })
    }

    /// Updates the means of squares with `x`, all of which was sent.
    pub fn follow_squares(&self, x: View<'_>, squares: ViewMut<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(cpu) => top_k::update_squares(cpu, x.host(), squares.host()),
            Backend::Cuda(gpu) => cuda::pack::follow_squares(gpu, x, squares),
        })
    }

    /// Adds pairs to `out`, whose first element has the index `first`. Pairs with the same index are added in order.
    pub fn add_pairs(&self, pairs: View<'_>, first: usize, out: ViewMut<'_>) {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(_) => top_k::add_pairs(pairs.host(), first, out.host()),
            Backend::Cuda(gpu) => cuda::pack::add_pairs(gpu, pairs, first, out),
        })
    }

    /// Number of pairs whose index is below `index`. Pairs are sorted by index. Waits for the result.
    pub fn pairs_below(&self, pairs: View<'_>, index: usize) -> usize {
        self.execute(OpClass::Elementwise, |backend| match backend {
            Backend::Cpu(_) => top_k::pairs_below(pairs.host(), index),
            Backend::Cuda(gpu) => cuda::pack::pairs_below(gpu, pairs, index),
        })
    }
}
