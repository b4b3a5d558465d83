//! The bf16 micro-kernel on AMX tiles: 32×32 accumulators in four tile registers, two registers each for `a` and
//! `b`.

use super::pack_bf16::{SIDE, TILE, TILE_K};
use super::panel::{KernelArgs, PanelA, PanelRequest};
use super::{Data, Operand};
use crate::cpu::amx_tiles::{TileConfig, nop_spaced};
use std::arch::asm;

/// Runs `work` with this thread's tile registers configured.
///
/// # Safety
/// As `TileConfig::load`.
pub unsafe fn with_tiles(work: &mut dyn FnMut()) {
    // SAFETY: the caller's promise.
    let _tiles = unsafe { TileConfig::load() };
    work();
}

/// Bytes of a panel that stays in L1 while panels of `b` stream past it.
const L1_PANEL_BYTES: usize = 32 << 10;
/// Lines with a stride that is a multiple of this map to half of the sets of L1 or fewer.
const L1_HALF_SETS: usize = 2 << 10;
const ACCUMULATOR_BYTES: usize = 4 * (2 * SIDE) * (2 * SIDE);

/// Full rows of bf16 that are contiguous along k already have the layout of AMX tiles.
pub fn unpacked_a(from: &Operand<'_>, panel: PanelRequest) -> Option<PanelA> {
    let PanelRequest { rows, ks, kc, mr, .. } = panel;
    let Data::Bf16(values) = from.data else { return None };
    let whole_tiles = rows.len() == mr && !ks.is_empty() && ks.len().is_multiple_of(TILE_K);
    if !from.k_contiguous || !whole_tiles {
        return None;
    }
    let start = values[from.index(rows.start, ks.start)..].as_ptr().cast::<u8>();
    // A tile row that straddles two cache lines costs two loads: packing once is cheaper.
    if !start.addr().is_multiple_of(64) || !(2 * from.stride).is_multiple_of(64) {
        return None;
    }
    // A panel that fits in L1, and that every tile reads again, is packed if its rows would map to few cache sets.
    if (2 * from.stride).is_multiple_of(L1_HALF_SETS) && 2 * mr * kc <= L1_PANEL_BYTES {
        return None;
    }
    Some(PanelA { start, row_stride: 2 * from.stride, k_stride: 2 * TILE_K })
}

/// Operands of the assembly, in the order in which it reads them.
#[repr(C)]
struct AsmArgs {
    /// Steps along k that prefetch the output, and the remaining steps.
    output_steps: usize,
    other_steps: usize,
    /// The first sixteen rows of `a` and the last sixteen, bytes between rows, and between tiles along k.
    upper: *const u8,
    lower: *const u8,
    row_stride: usize,
    k_stride: usize,
    b: *const u8,
    acc: *mut f32,
    acc_stride: usize,
    accumulate: usize,
    /// Rows of the next panel to prefetch, one line of each per step, and bytes between them.
    next_a: *const u8,
    next_a_stride: usize,
    /// Destination of the tile; eight of its rows are prefetched in each of the first steps.
    output: *const u8,
    output_stride: usize,
    /// Accumulator of the next tile; six of its lines are prefetched in each remaining step, `next_acc_step` bytes
    /// further every time.
    next_acc: *const f32,
    next_acc_step: usize,
}

/// Adds (32, k)·(k, 32) to the accumulator; k is a multiple of 32.
///
/// # Safety
/// Inside `with_tiles`; `a` and `b` hold k / 32 tiles per 16 rows, the accumulator is (32, 32).
pub unsafe fn multiply(args: &KernelArgs) {
    let KernelArgs { k, a, b, prefetch, acc, .. } = *args;
    let tiles = k / TILE_K;
    // Packed tiles of the upper and the lower half alternate. A packed panel is prefetched as if it were rows.
    let (lower, row_stride, k_stride, prefetch_stride) = match a.row_stride {
        0 => (2 * TILE, 2 * TILE_K, 4 * TILE, 2 * TILE_K * tiles),
        stride => (SIDE * stride, stride, a.k_stride, stride),
    };
    // All tiles of this panel prefetch an equal part of the next one: a burst of prefetches would delay the loads
    // that are needed now.
    let lines = match prefetch.tiles {
        0..8 => 8,
        8..16 => 4,
        _ => 2,
    };
    let first = lines * prefetch.tile;
    let prefetching = first < 2 * SIDE;
    let output_steps = tiles.min(4);
    let asm_args = AsmArgs {
        output_steps,
        other_steps: tiles - output_steps,
        upper: a.start,
        lower: a.start.wrapping_add(lower),
        row_stride,
        k_stride,
        b,
        acc: acc.start,
        acc_stride: 4 * acc.stride,
        accumulate: acc.accumulate as usize,
        next_a: match prefetching {
            true => prefetch.next.wrapping_add(first * prefetch_stride),
            false => a.start,
        },
        next_a_stride: if prefetching { prefetch_stride } else { 0 },
        output: acc.output,
        output_stride: acc.output_stride,
        next_acc: acc.next,
        next_acc_step: match acc.next == acc.start {
            true => 0,
            false => {
                let step = ACCUMULATOR_BYTES / (tiles - output_steps).max(1);
                step.next_multiple_of(64).min(6 * 64)
            }
        },
    };
    // SAFETY: the addresses are those the caller promised; prefetches may point anywhere.
    unsafe {
        match lines {
            8 => prefetch_eight(&asm_args),
            4 => prefetch_four(&asm_args),
            _ => prefetch_two(&asm_args),
        }
    }
}

/// A step along k: four tile loads and four products, with prefetches in between, where they are free. Tiles of
/// `b` are used once per panel of `a` and bypass L1 (`t1`), where the panel of `a` stays.
macro_rules! step {
    ($early:literal, $late:literal) => {
        concat!(
            nop_spaced!(
                "tileloaddt1 tmm6, [rsi + rdi*1]",
                "tileloadd tmm4, [r8 + r10*1]",
                "tileloaddt1 tmm7, [rsi + rdi*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [r9 + r10*1]",
            ),
            $early,
            nop_spaced!("tdpbf16ps tmm1, tmm4, tmm7"),
            $late,
            nop_spaced!(
                "tdpbf16ps tmm2, tmm5, tmm6\n add r12, 64\n add r13, 64\n add r8, r11\n add r9, r11",
                "tdpbf16ps tmm3, tmm5, tmm7\n add rsi, 2048",
            ),
        )
    };
}

/// One function for each number of lines prefetched per step.
macro_rules! prefetching {
    ($name:ident, $early:literal, $late:literal) => {
        /// # Safety
        /// As `multiply`.
        unsafe fn $name(args: &AsmArgs) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    "mov r10, [rax + 8*8]",
                    "mov rdx, [rax + 7*8]",
                    "mov r11, r10",
                    "shl r11, 4",
                    "add r11, rdx",
                    "cmp qword ptr [rax + 9*8], 0",
                    "je 3f",
                    "tileloadd tmm0, [rdx + r10*1]",
                    "tileloadd tmm1, [rdx + r10*1 + 64]",
                    "tileloadd tmm2, [r11 + r10*1]",
                    "tileloadd tmm3, [r11 + r10*1 + 64]",
                    "jmp 4f",
                    "3:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "4:",
                    "mov r8, [rax + 2*8]",
                    "mov r9, [rax + 3*8]",
                    "mov r10, [rax + 4*8]",
                    "mov r11, [rax + 5*8]",
                    "mov rsi, [rax + 6*8]",
                    "mov rdi, 64",
                    "mov r12, [rax + 10*8]",
                    "mov r14, [rax + 11*8]",
                    "lea r13, [r12 + r14*4]",
                    "lea r15, [r14 + r14*2]",
                    "mov rcx, [rax]",
                    "test rcx, rcx",
                    "jz 5f",
                    "mov rdx, [rax + 12*8]",
                    "2:",
                    step!($early, $late),
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "prefetchw [rdx]",
                    "add rdx, [rax + 13*8]",
                    "dec rcx",
                    "jnz 2b",
                    "5:",
                    "mov rcx, [rax + 1*8]",
                    "test rcx, rcx",
                    "jz 7f",
                    "mov rdx, [rax + 14*8]",
                    "6:",
                    step!($early, $late),
                    "prefetchw [rdx]",
                    "prefetchw [rdx + 64]",
                    "prefetchw [rdx + 128]",
                    "prefetchw [rdx + 192]",
                    "prefetchw [rdx + 256]",
                    "prefetchw [rdx + 320]",
                    "add rdx, [rax + 15*8]",
                    "dec rcx",
                    "jnz 6b",
                    "7:",
                    "mov r10, [rax + 8*8]",
                    "mov rdx, [rax + 7*8]",
                    "mov r11, r10",
                    "shl r11, 4",
                    "add r11, rdx",
                    "tilestored [rdx + r10*1], tmm0",
                    "tilestored [rdx + r10*1 + 64], tmm1",
                    "tilestored [r11 + r10*1], tmm2",
                    "tilestored [r11 + r10*1 + 64], tmm3",
                    in("rax") args,
                    out("rcx") _, out("rdx") _, out("rsi") _, out("rdi") _, out("r8") _, out("r9") _,
                    out("r10") _, out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

prefetching!(prefetch_two, "prefetcht1 [r12]\n", "prefetcht1 [r12 + r14]\n");
prefetching!(
    prefetch_four,
    "prefetcht1 [r12]\n prefetcht1 [r12 + r14]\n",
    "prefetcht1 [r12 + r14*2]\n prefetcht1 [r12 + r15]\n"
);
prefetching!(
    prefetch_eight,
    "prefetcht1 [r12]\n prefetcht1 [r12 + r14]\n prefetcht1 [r12 + r14*2]\n prefetcht1 [r12 + r15]\n",
    "prefetcht1 [r13]\n prefetcht1 [r13 + r14]\n prefetcht1 [r13 + r14*2]\n prefetcht1 [r13 + r15]\n"
);
