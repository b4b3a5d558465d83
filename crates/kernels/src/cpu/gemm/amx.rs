//! The bf16 inner loop on AMX tiles: 32×32 sums in four tile registers, two each for `a` and `b`. In
//! assembly, as the compiler's intrinsics for tiles are not stable.

use super::kernel::Rows;
use super::pairs::{DEEP, SIDE, TILE};
use super::{Data, Operand};
use std::arch::asm;
use std::ops::Range;

/// Columns of a block of sums.
const BLOCK: usize = 32;

/// Eight tiles of sixteen rows of 64 bytes: what `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

const ALL_FULL: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_per_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Runs `work` with this thread's tile registers configured. They are empty again after: a thread that holds
/// none is cheaper to switch away from.
///
/// # Safety
/// The processor has AMX and the kernel allows it.
pub unsafe fn with_tiles(work: &mut dyn FnMut()) {
    // SAFETY: the configuration is of the form that palette 1 asks for.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &ALL_FULL, options(nostack, readonly)) };
    work();
    // SAFETY: releasing tiles touches no memory.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Full rows of bf16 that run along k are tiles as they lie.
pub fn in_place(
    from: &Operand<'_>,
    lanes: Range<usize>,
    rows: usize,
    ks: Range<usize>,
) -> Option<Rows> {
    let Data::Bf16(values) = from.data else { return None };
    if !from.k_runs || lanes.len() < rows || ks.is_empty() || !ks.len().is_multiple_of(DEEP) {
        return None;
    }
    let start = values[from.index(lanes.start, ks.start)..].as_ptr().cast();
    Some(Rows { start, stride: 2 * from.stride, step: 2 * DEEP })
}

/// `sums` (32, 32) of `k` steps, a whole number of tiles, on top of what is there or of nothing.
///
/// # Safety
/// Inside `with_tiles`; `a` and `b` hold that many tiles, `sums` can be read and written.
pub unsafe fn multiply(
    _rows: usize,
    k: usize,
    a: Rows,
    b: *const u8,
    sums: *mut f32,
    resume: bool,
) {
    let tiles = k / DEEP;
    let stride = 4 * BLOCK;
    // SAFETY: the addresses are those the caller promised.
    unsafe {
        // Packed tiles of the upper and the lower half alternate.
        let (upper, lower_a, rows, step) = match a.stride {
            0 => (a.start, a.start.add(2 * TILE), 2 * DEEP, 4 * TILE),
            stride => (a.start, a.start.add(SIDE * stride), stride, a.step),
        };
        let right = sums.byte_add(64);
        let lower = sums.byte_add(16 * stride);
        let lower_right = lower.byte_add(64);
        if resume {
            asm!(
                "tileloadd tmm0, [{c0} + {stride}*1]",
                "tileloadd tmm1, [{c1} + {stride}*1]",
                "tileloadd tmm2, [{c2} + {stride}*1]",
                "tileloadd tmm3, [{c3} + {stride}*1]",
                c0 = in(reg) sums, c1 = in(reg) right, c2 = in(reg) lower, c3 = in(reg) lower_right,
                stride = in(reg) stride,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, readonly),
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
        }
        if tiles > 0 {
            asm!(
                "2:",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tileloadd tmm4, [{upper} + {rows}*1]",
                "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{lower} + {rows}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {upper}, {step}",
                "add {lower}, {step}",
                "add {b}, 2048",
                "dec {tiles}",
                "jnz 2b",
                upper = inout(reg) upper => _, lower = inout(reg) lower_a => _,
                rows = in(reg) rows, step = in(reg) step,
                b = inout(reg) b => _, line = in(reg) 64usize,
                tiles = inout(reg) tiles => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
        asm!(
            "tilestored [{c0} + {stride}*1], tmm0",
            "tilestored [{c1} + {stride}*1], tmm1",
            "tilestored [{c2} + {stride}*1], tmm2",
            "tilestored [{c3} + {stride}*1], tmm3",
            c0 = in(reg) sums, c1 = in(reg) right, c2 = in(reg) lower, c3 = in(reg) lower_right,
            stride = in(reg) stride,
            options(nostack),
        );
    }
}
