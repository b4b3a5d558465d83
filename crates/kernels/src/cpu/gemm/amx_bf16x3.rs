//! The f32 micro-kernel on AMX tiles by bf16x3 decomposition: each f32 is the sum of three bf16 terms, and six of
//! the nine products of their terms are enough for the precision of an f32 sum. 32×32 accumulators in four tile
//! registers, two registers each for terms of `a` and `b`.

use super::pack_bf16::{SIDE, TILE, TILE_K};
use super::pack_bf16x3::TERMS;
use super::panel::{Accumulator, KernelArgs};
use crate::cpu::amx_tiles::nop_spaced;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Bytes of one step along k in a panel: `[term][outer / 16]` tiles.
const STEP: usize = TERMS * 2 * 2 * TILE;

/// Operands of the assembly, in the order in which it reads them.
#[repr(C)]
struct AsmArgs {
    /// Steps along k that prefetch the output, and the remaining steps.
    output_steps: usize,
    other_steps: usize,
    a: *const u8,
    b: *const u8,
    acc: *mut f32,
    acc_stride: usize,
    /// Destination of the tile; eight of its rows are prefetched in each of the first steps.
    output: *const u8,
    output_stride: usize,
    /// Part of the next panel of `a`, twelve lines of which are prefetched per step, and bytes between steps.
    next_a: *const u8,
    next_a_step: usize,
}

/// Bytes of the next panel of `a` that a tile prefetches in each step: eight tiles prefetch all of it.
const PREFETCH_BYTES: usize = STEP / 8;

/// # Safety
/// Inside `amx_bf16::with_tiles`; `a` and `b` are packed panels; k is a multiple of 32; the accumulator is (32, 32).
pub unsafe fn multiply(args: &KernelArgs) {
    let KernelArgs { k, a, b, prefetch, acc, .. } = *args;
    let steps = k / TILE_K;
    let offset = prefetch.tile * PREFETCH_BYTES;
    let prefetching = offset < STEP;
    let output_steps = steps.min(2 * SIDE / 8);
    let mut block_sum = MaybeUninit::<BlockSum>::uninit();
    let (to, stride) = match acc.accumulate {
        true => (block_sum.as_mut_ptr().cast(), 2 * SIDE),
        false => (acc.start, acc.stride),
    };
    let asm_args = AsmArgs {
        output_steps,
        other_steps: steps - output_steps,
        a: a.start,
        b,
        acc: to,
        acc_stride: 4 * stride,
        output: acc.output,
        output_stride: acc.output_stride,
        next_a: if prefetching { prefetch.next.wrapping_add(offset) } else { a.start },
        next_a_step: if prefetching { STEP } else { 0 },
    };
    // SAFETY: the addresses are those the caller promised; prefetches may point anywhere.
    unsafe {
        k_loop(&asm_args);
        if acc.accumulate {
            // The loop has written all of it.
            add(block_sum.assume_init_ref(), acc);
        }
    }
}

/// Sum over one block of k. It starts at zero and is added to the stored values at the end: accumulating across
/// blocks would round at the magnitude of the full sum six times for each 32 k.
#[repr(align(64))]
struct BlockSum([f32; 4 * SIDE * SIDE]);

/// # Safety
/// The processor has AVX-512, and the accumulator is (32, 32).
#[target_feature(enable = "avx512f")]
unsafe fn add(block_sum: &BlockSum, acc: Accumulator) {
    for (row, values) in block_sum.0.chunks_exact(2 * SIDE).enumerate() {
        for (half, values) in values.chunks_exact(SIDE).enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let to = acc.start.add(row * acc.stride + half * SIDE);
                let values = _mm512_loadu_ps(values.as_ptr());
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), values));
            }
        }
    }
}

/// A step along k: the products of terms (a, b) in the order 02, 01, 11, 10, 20, 00, four tiles each. Consecutive
/// products share one side; the other is loaded ahead of the products that need it.
macro_rules! step {
    () => {
        nop_spaced!(
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

/// Prefetches four rows of the destination for writing, two lines each.
macro_rules! prefetch_output {
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
unsafe fn k_loop(args: &AsmArgs) {
    // SAFETY: the caller's promise.
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
            prefetch_output!(),
            prefetch_output!(),
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
            in("rax") args,
            out("rcx") _, out("rdx") _, out("rsi") _, out("rdi") _, out("r8") _, out("r9") _,
            out("r10") _, out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
