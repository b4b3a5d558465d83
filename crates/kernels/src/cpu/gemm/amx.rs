//! The bf16 inner loop on AMX tiles: 32×32 sums in four tile registers, two each for `a` and `b`. In
//! assembly, as the compiler's intrinsics for tiles are not stable.

use half::bf16;
use std::arch::asm;

/// Rows and columns of a block of sums.
pub const BLOCK: usize = 32;

/// Thirty-two rows of `a` as the tiles find them.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The first sixteen, and the others.
    pub upper: *const bf16,
    pub lower: *const bf16,
    /// Bytes from row to row.
    pub stride: usize,
    /// Bytes from one tile along k to the next.
    pub step: usize,
}

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
pub unsafe fn with_tiles(work: impl FnOnce()) {
    // SAFETY: the configuration is of the form that palette 1 asks for.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &ALL_FULL, options(nostack, readonly)) };
    work();
    // SAFETY: releasing tiles touches no memory.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// `sums` (32, 32), `stride` bytes from row to row, of `tiles` steps along k; on top of what is there or of
/// nothing.
///
/// # Safety
/// Inside `with_tiles`; `rows` and `b` hold that many tiles, `sums` can be read and written.
pub unsafe fn multiply(
    tiles: usize,
    rows: Rows,
    b: *const bf16,
    sums: *mut f32,
    stride: usize,
    resume: bool,
) {
    // SAFETY: the addresses are those the caller promised.
    unsafe {
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
                upper = inout(reg) rows.upper => _, lower = inout(reg) rows.lower => _,
                rows = in(reg) rows.stride, step = in(reg) rows.step,
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
