//! The f32 inner loop on AMX tiles, which multiply bf16 only: each f32 is the sum of three bf16, and six of the
//! nine products of their parts are all that an f32 sum has room for. 32×32 sums in four tile registers, two
//! each for the parts of `a` and `b`.

use super::kernel::{Ahead, Rows, Sums};
use super::pairs::{DEEP, SIDE, TILE};
use super::parts::PARTS;
use crate::cpu::tiles::apart;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Bytes of one step along k in a panel: `[part][lane / 16]` tiles.
const STEP: usize = PARTS * 2 * 2 * TILE;

/// What the assembly reads, in its own order.
#[repr(C)]
struct Arguments {
    /// Steps along k: those that ask for the output's lines on the way, and the others.
    placing: usize,
    others: usize,
    a: *const u8,
    b: *const u8,
    sums: *mut f32,
    sums_stride: usize,
    /// Where rows of the output will be written, eight of which are asked for in each of the first steps.
    place: *const u8,
    place_stride: usize,
    /// Twelve lines to ask for, and as many a step further in each step.
    ahead: *const u8,
    ahead_step: usize,
}

/// Bytes of the next panel of `a` that a tile asks for in each step: eight tiles, and all of it has come.
const SHARE: usize = STEP / 8;

/// # Safety
/// In `amx::with_tiles`; `a` and `b` are packed panels of `k`, a multiple of 32; the sums are (32, 32).
pub unsafe fn multiply(_rows: usize, k: usize, a: Rows, ahead: Ahead, b: *const u8, sums: Sums) {
    let steps = k / DEEP;
    let share = ahead.tile * SHARE;
    let asking = share < STEP;
    let placing = steps.min(2 * SIDE / 8);
    let mut piece = MaybeUninit::<Piece>::uninit();
    let (to, stride) = match sums.resume {
        true => (piece.as_mut_ptr().cast(), 2 * SIDE),
        false => (sums.start, sums.stride),
    };
    let arguments = Arguments {
        placing,
        others: steps - placing,
        a: a.start,
        b,
        sums: to,
        sums_stride: 4 * stride,
        place: sums.place,
        place_stride: sums.place_stride,
        ahead: if asking { ahead.next.wrapping_add(share) } else { a.start },
        ahead_step: if asking { STEP } else { 0 },
    };
    // SAFETY: the addresses are those the caller promised; prefetches may point anywhere.
    unsafe {
        steps_along_k(&arguments);
        if sums.resume {
            // All of it was written just now.
            add(piece.assume_init_ref(), sums);
        }
    }
}

/// The sums of one piece of k. They begin with zero and are added to what is there when they are whole: a sum that
/// went on from piece to piece would be rounded six times for each 32 k at its full height.
#[repr(align(64))]
struct Piece([f32; 4 * SIDE * SIDE]);

/// # Safety
/// The processor has AVX-512, and the sums are (32, 32).
#[target_feature(enable = "avx512f")]
unsafe fn add(piece: &Piece, sums: Sums) {
    for (row, values) in piece.0.chunks_exact(2 * SIDE).enumerate() {
        for (half, values) in values.chunks_exact(SIDE).enumerate() {
            // SAFETY: the caller's promise, passed on.
            unsafe {
                let to = sums.start.add(row * sums.stride + half * SIDE);
                let values = _mm512_loadu_ps(values.as_ptr());
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), values));
            }
        }
    }
}

/// A step along k: the products of parts (a, b) in the order 02, 01, 11, 10, 20, 00, each pair of parts four
/// tiles. From one to the next only one side is loaded anew, and before the products that wait for it.
macro_rules! step {
    () => {
        apart!(
            "tileloaddt1 tmm6, [rsi + rdi*1 + 4096]",
            "tileloadd tmm4, [r8 + rdi*1]",
            "tileloaddt1 tmm7, [rsi + rdi*1 + 5120]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [r8 + rdi*1 + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7\n prefetcht1 [r12]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloaddt1 tmm6, [rsi + rdi*1 + 2048]",
            "tdpbf16ps tmm3, tmm5, tmm7\n prefetcht1 [r12 + 64]",
            "tileloaddt1 tmm7, [rsi + rdi*1 + 3072]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7\n prefetcht1 [r12 + 128]",
            "tileloadd tmm4, [r8 + rdi*1 + 2048]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7\n prefetcht1 [r12 + 192]",
            "tileloadd tmm5, [r8 + rdi*1 + 3072]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7\n prefetcht1 [r12 + 256]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloaddt1 tmm6, [rsi + rdi*1]",
            "tdpbf16ps tmm3, tmm5, tmm7\n prefetcht1 [r12 + 320]",
            "tileloaddt1 tmm7, [rsi + rdi*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7\n prefetcht1 [r12 + 384]",
            "tileloadd tmm4, [r8 + rdi*1 + 4096]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7\n prefetcht1 [r12 + 448]",
            "tileloadd tmm5, [r8 + rdi*1 + 5120]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7\n prefetcht1 [r12 + 512]",
            "tileloadd tmm4, [r8 + rdi*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7\n prefetcht1 [r12 + 576]",
            "tileloadd tmm5, [r8 + rdi*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7\n prefetcht1 [r12 + 640]\n prefetcht1 [r12 + 704]\n add r12, r13\n add r8, {step}\n add rsi, {step}",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
        )
    };
}

/// Asks for four rows of the output's tile, two lines each, to own them.
macro_rules! place_four {
    () => {
        concat!(
            "prefetchw [r9]\n",
            "prefetchw [r9 + 64]\n",
            "prefetchw [r9 + r14]\n",
            "prefetchw [r9 + r14 + 64]\n",
            "prefetchw [r9 + r14*2]\n",
            "prefetchw [r9 + r14*2 + 64]\n",
            "prefetchw [r9 + r15]\n",
            "prefetchw [r9 + r15 + 64]\n",
            "lea r9, [r9 + r14*4]\n",
        )
    };
}

/// # Safety
/// As `multiply`.
unsafe fn steps_along_k(arguments: &Arguments) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        asm!(
            "mov r10, [rax + 5*8]",
            "mov rdx, [rax + 4*8]",
            "mov r11, r10",
            "shl r11, 4",
            "add r11, rdx",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "mov r8, [rax + 2*8]",
            "mov rsi, [rax + 3*8]",
            "mov rdi, 64",
            "mov r9, [rax + 6*8]",
            "mov r14, [rax + 7*8]",
            "lea r15, [r14 + r14*2]",
            "mov r12, [rax + 8*8]",
            "mov r13, [rax + 9*8]",
            "mov rcx, [rax]",
            "test rcx, rcx",
            "jz 5f",
            "2:",
            place_four!(),
            place_four!(),
            step!(),
            "dec rcx",
            "jnz 2b",
            "5:",
            "mov rcx, [rax + 1*8]",
            "test rcx, rcx",
            "jz 7f",
            "6:",
            step!(),
            "dec rcx",
            "jnz 6b",
            "7:",
            "tilestored [rdx + r10*1], tmm0",
            "tilestored [rdx + r10*1 + 64], tmm1",
            "tilestored [r11 + r10*1], tmm2",
            "tilestored [r11 + r10*1 + 64], tmm3",
            step = const STEP,
            in("rax") arguments,
            out("rcx") _, out("rdx") _, out("rsi") _, out("rdi") _, out("r8") _, out("r9") _,
            out("r10") _, out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
