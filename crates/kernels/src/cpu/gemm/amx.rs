//! The bf16 inner loop on AMX tiles: 32×32 sums in four tile registers, two each for `a` and `b`.

use super::kernel::{Ahead, Lying, Rows, Sums};
use super::pairs::{DEEP, SIDE, TILE};
use super::{Data, Operand};
use crate::cpu::tiles::{Tiles, apart};
use std::arch::asm;

/// Runs `work` with this thread's tile registers set up.
///
/// # Safety
/// As `Tiles::configured`.
pub unsafe fn with_tiles(work: &mut dyn FnMut()) {
    // SAFETY: the caller's promise, passed on.
    let _tiles = unsafe { Tiles::configured() };
    work();
}

/// Bytes of a panel that stays in L1 while others pass by.
const ROOM_IN_L1: usize = 32 << 10;
/// Lines so many bytes apart fall into half of the sets of L1.
const HALF_OF_SETS: usize = 2 << 10;
/// Bytes of the sums of a tile.
const SUMS: usize = 4 * (2 * SIDE) * (2 * SIDE);

/// Full rows of bf16 that run along k are tiles as they lie.
pub fn in_place(from: &Operand<'_>, Lying { lanes, ks, long, rows, .. }: Lying) -> Option<Rows> {
    let Data::Bf16(values) = from.data else { return None };
    if !from.k_runs || lanes.len() < rows || ks.is_empty() || !ks.len().is_multiple_of(DEEP) {
        return None;
    }
    let start = values[from.index(lanes.start, ks.start)..].as_ptr().cast::<u8>();
    // A row of a tile that straddles two lines costs two: copying once is cheaper.
    if !start.addr().is_multiple_of(64) || !(2 * from.stride).is_multiple_of(64) {
        return None;
    }
    // Rows that lie so far apart fall into half of the sets of L1, or less. A panel that would have room there, and be
    // found again by each tile, is better packed.
    if (2 * from.stride).is_multiple_of(HALF_OF_SETS) && 2 * rows * long <= ROOM_IN_L1 {
        return None;
    }
    Some(Rows { start, stride: 2 * from.stride, step: 2 * DEEP })
}

/// What the assembly reads, in its own order.
#[repr(C)]
struct Arguments {
    /// Steps along k: those that ask for the output's lines on the way, and the others.
    placing: usize,
    others: usize,
    /// The first sixteen rows of `a` and the others, bytes from row to row, and from tile to tile along k.
    upper: *const u8,
    lower: *const u8,
    stride: usize,
    step: usize,
    b: *const u8,
    sums: *mut f32,
    sums_stride: usize,
    resume: usize,
    /// Rows to ask for, a line of each per step, and bytes from row to row.
    ahead: *const u8,
    ahead_stride: usize,
    /// Where rows of the output will be written, eight of which are asked for in each of the first steps.
    place: *const u8,
    place_stride: usize,
    /// Sums to ask for, six lines in each of the other steps, and so many bytes further in the next.
    next: *const f32,
    next_step: usize,
}

/// Adds (32, k)·(k, 32) to the sums, for a `k` of whole tiles.
///
/// # Safety
/// Inside `with_tiles`; `a` and `b` hold that many tiles, the sums are (32, 32).
pub unsafe fn multiply(_rows: usize, k: usize, a: Rows, ahead: Ahead, b: *const u8, sums: Sums) {
    let tiles = k / DEEP;
    // Packed tiles of the upper and the lower half alternate. A packed panel is asked for as if it were rows.
    let (lower, stride, step, row) = match a.stride {
        0 => (2 * TILE, 2 * DEEP, 4 * TILE, 2 * DEEP * tiles),
        stride => (SIDE * stride, stride, a.step, stride),
    };
    // All the tiles of this panel ask for their share of the next one: lines that come in a burst hold up those
    // that are needed now.
    let lines = match ahead.tiles {
        0..8 => 8,
        8..16 => 4,
        _ => 2,
    };
    let first = lines * ahead.tile;
    let asking = first < 2 * SIDE;
    let placing = tiles.min(4);
    let arguments = Arguments {
        placing,
        others: tiles - placing,
        upper: a.start,
        lower: a.start.wrapping_add(lower),
        stride,
        step,
        b,
        sums: sums.start,
        sums_stride: 4 * sums.stride,
        resume: sums.resume as usize,
        ahead: if asking { ahead.next.wrapping_add(first * row) } else { a.start },
        ahead_stride: if asking { row } else { 0 },
        place: sums.place,
        place_stride: sums.place_stride,
        next: sums.next,
        next_step: match sums.next == sums.start {
            true => 0,
            false => (SUMS / (tiles - placing).max(1)).next_multiple_of(64).min(6 * 64),
        },
    };
    // SAFETY: the addresses are those the caller promised; prefetches may point anywhere.
    unsafe {
        match lines {
            8 => ask_eight(&arguments),
            4 => ask_four(&arguments),
            _ => ask_two(&arguments),
        }
    }
}

/// A step along k: four loads of tiles and four products, and in between, where they cost nothing, lines that
/// are asked for. Tiles of `b` are used once and pass by L1 (`t1`), where the panel of `a` stays that all of
/// them meet.
macro_rules! step {
    ($early:literal, $late:literal) => {
        concat!(
            apart!(
                "tileloaddt1 tmm6, [rsi + rdi*1]",
                "tileloadd tmm4, [r8 + r10*1]",
                "tileloaddt1 tmm7, [rsi + rdi*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [r9 + r10*1]",
            ),
            $early,
            apart!("tdpbf16ps tmm1, tmm4, tmm7"),
            $late,
            apart!(
                "tdpbf16ps tmm2, tmm5, tmm6\n add r12, 64\n add r13, 64\n add r8, r11\n add r9, r11",
                "tdpbf16ps tmm3, tmm5, tmm7\n add rsi, 2048",
            ),
        )
    };
}

/// One function for each number of lines that a step asks for.
macro_rules! asking {
    ($name:ident, $early:literal, $late:literal) => {
        /// # Safety
        /// As `multiply`.
        unsafe fn $name(arguments: &Arguments) {
            // SAFETY: the caller's promise, passed on.
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
                    in("rax") arguments,
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

asking!(ask_two, "prefetcht1 [r12]\n", "prefetcht1 [r12 + r14]\n");
asking!(
    ask_four,
    "prefetcht1 [r12]\n prefetcht1 [r12 + r14]\n",
    "prefetcht1 [r12 + r14*2]\n prefetcht1 [r12 + r15]\n"
);
asking!(
    ask_eight,
    "prefetcht1 [r12]\n prefetcht1 [r12 + r14]\n prefetcht1 [r12 + r14*2]\n prefetcht1 [r12 + r15]\n",
    "prefetcht1 [r13]\n prefetcht1 [r13 + r14]\n prefetcht1 [r13 + r14*2]\n prefetcht1 [r13 + r15]\n"
);
