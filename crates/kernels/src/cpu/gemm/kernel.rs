//! Selects the micro-kernel of an instruction set: its tile and block sizes, and its packing routines.

use super::panel::{Multiply, Pack, PanelA, PanelRequest};
use super::{Operand, pack_f32, portable};
#[cfg(target_arch = "x86_64")]
use super::{amx_bf16, amx_bf16x3, avx2, avx512, pack_avx512, pack_bf16, pack_bf16x3};
use crate::cpu::Level;
use std::ops::Range;

/// A micro-kernel with its block sizes. Sizes follow BLIS: mr × nr is the register tile, kc the length of a
/// panel along k. Panels are bytes here; only the kernel knows their element type.
pub struct MicroKernel {
    pub level: Level,
    /// Rows of a panel of `a`; the size that wastes the fewest rows is used.
    pub mr: Range<usize>,
    /// Columns of a panel of `b`.
    pub nr: usize,
    /// Panels are padded with zeros to a multiple of this along k.
    pub k_multiple: usize,
    /// Blocking when partial sums are kept in the output.
    pub direct: KBlocking,
    /// Blocking when they are kept in scratch and k fits in one block.
    pub unsplit: KBlocking,
    /// Blocking when they are kept in scratch and k does not fit in `unsplit.kc`.
    pub split: KBlocking,
    /// Bytes of a panel element.
    pub element_bytes: usize,
    /// Runs a closure on this thread with the kernel's registers configured.
    pub configured: unsafe fn(&mut dyn FnMut()),
    pub multiply: Multiply,
    pub pack_a: Pack,
    pub pack_b: Pack,
    /// Returns rows of `a` in place when they need no packing.
    pub unpacked_a: fn(&Operand<'_>, PanelRequest) -> Option<PanelA>,
}

#[derive(Clone, Copy)]
pub struct KBlocking {
    /// Maximum length of a panel along k.
    pub kc: usize,
    /// Bytes of the packed chunk of `b`, which stays in L2 while the panels of `a` stream past it.
    pub chunk_bytes: usize,
}

impl MicroKernel {
    /// The kernel for f32 operands, or for bf16 operands (`bf16`).
    pub fn select(level: Level, bf16: bool) -> MicroKernel {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx if bf16 => MicroKernel {
                level,
                mr: 32..33,
                nr: 32,
                k_multiple: 32,
                direct: KBlocking { kc: 1024, chunk_bytes: 1 << 20 },
                unsplit: KBlocking { kc: 1024, chunk_bytes: 1 << 20 },
                // A panel of `a` fits in L1.
                split: KBlocking { kc: 512, chunk_bytes: 512 << 10 },
                element_bytes: 2,
                configured: amx_bf16::with_tiles,
                multiply: amx_bf16::multiply,
                pack_a: pack_bf16::pack_a,
                pack_b: pack_bf16::pack_b,
                unpacked_a: amx_bf16::unpacked_a,
            },
            #[cfg(target_arch = "x86_64")]
            Level::Amx => MicroKernel {
                level,
                mr: 32..33,
                nr: 32,
                k_multiple: 32,
                direct: KBlocking { kc: 512, chunk_bytes: 1 << 20 },
                unsplit: KBlocking { kc: 1024, chunk_bytes: 1 << 20 },
                split: KBlocking { kc: 1024, chunk_bytes: 1 << 20 },
                element_bytes: 2 * pack_bf16x3::TERMS,
                configured: amx_bf16::with_tiles,
                multiply: amx_bf16x3::multiply,
                pack_a: pack_bf16x3::pack_a,
                pack_b: pack_bf16x3::pack_b,
                unpacked_a: |_, _| None,
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => MicroKernel {
                unpacked_a: avx512::unpacked_a,
                ..MicroKernel::f32(level, 11..14, 32, avx512::multiply, pack_avx512::pack)
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => MicroKernel::f32(level, 5..7, 16, avx2::multiply, pack_f32::avx2),
            _ => MicroKernel::f32(level, 4..5, 8, portable::multiply, pack_f32::portable),
        }
    }

    fn f32(
        level: Level,
        mr: Range<usize>,
        nr: usize,
        multiply: Multiply,
        pack: Pack,
    ) -> MicroKernel {
        let blocking = KBlocking { kc: 512, chunk_bytes: 768 << 10 };
        MicroKernel {
            level,
            mr,
            nr,
            k_multiple: 1,
            direct: blocking,
            unsplit: blocking,
            split: blocking,
            element_bytes: 4,
            configured: |work| work(),
            multiply,
            pack_a: pack,
            pack_b: pack,
            unpacked_a: |_, _| None,
        }
    }

    pub fn k_blocking(&self, direct: bool, k: usize) -> KBlocking {
        match direct {
            true => self.direct,
            false if k <= self.unsplit.kc => self.unsplit,
            false => self.split,
        }
    }

    /// The panel height that pads `m` rows the least; the tallest of equals.
    pub fn panel_height(&self, m: usize) -> usize {
        let padded = |mr: &usize| m.next_multiple_of(*mr);
        self.mr.clone().rev().min_by_key(padded).expect("a kernel has at least one panel height")
    }
}
