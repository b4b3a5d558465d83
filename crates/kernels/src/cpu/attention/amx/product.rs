//! Products of bf16 matrices on AMX tile registers.

use crate::cpu::amx_tiles::nop_spaced;
use std::arch::asm;

/// Rows and columns of a register tile; all sizes are multiples of it.
pub(super) const TILE: usize = 32;

/// C (m, n) from A (m, k) and B (k, n). All three sizes are multiples of 32.
pub(super) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Rows of bf16, `a_stride` elements apart.
    pub a: *const u16,
    pub a_stride: usize,
    /// Rows of pairs: element (i, j) holds B's (2 i, j) in its lower half and (2 i + 1, j) in its upper half.
    pub b: *const u32,
    pub b_stride: usize,
    pub c: *mut f32,
    pub c_stride: usize,
    /// Add to C instead of overwriting it.
    pub accumulate: bool,
}

impl Product {
    /// # Safety
    /// This thread has a `TileConfig`; the pointers are valid for the given sizes, and C overlaps neither A nor B.
    pub unsafe fn run(&self) {
        debug_assert!(
            [self.m, self.n, self.k].iter().all(|size| size.is_multiple_of(TILE)) && self.k > 0
        );
        for i in (0..self.m).step_by(TILE) {
            for j in (0..self.n).step_by(TILE) {
                // SAFETY: the block is within A, B and C.
                unsafe { self.block(i, j) };
            }
        }
    }

    /// Computes a 32×32 block of C in four registers.
    #[inline(always)]
    unsafe fn block(&self, i: usize, j: usize) {
        // SAFETY: the block is within A, B and C; all registers used are declared.
        unsafe {
            let c = self.c.add(i * self.c_stride + j);
            let a = self.a.add(i * self.a_stride);
            asm!(
                "test {add}, {add}",
                "jz 2f",
                "tileloadd tmm0, [{c} + {cs}]",
                "tileloadd tmm1, [{c} + {cs} + 64]",
                "tileloadd tmm2, [{d} + {cs}]",
                "tileloadd tmm3, [{d} + {cs} + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                nop_spaced!(
                    "tileloadd tmm6, [{b} + {bs}]",
                    "tileloadd tmm4, [{a} + {r}]",
                    "tileloadd tmm7, [{b} + {bs} + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{e} + {r}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                ),
                "add {a}, 64",
                "add {e}, 64",
                "add {b}, {down}",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{c} + {cs}], tmm0",
                "tilestored [{c} + {cs} + 64], tmm1",
                "tilestored [{d} + {cs}], tmm2",
                "tilestored [{d} + {cs} + 64], tmm3",
                add = in(reg) usize::from(self.accumulate),
                c = in(reg) c,
                d = in(reg) c.add(16 * self.c_stride),
                cs = in(reg) self.c_stride * 4,
                a = inout(reg) a => _,
                e = inout(reg) a.add(16 * self.a_stride) => _,
                r = in(reg) self.a_stride * 2,
                b = inout(reg) self.b.add(j) => _,
                bs = in(reg) self.b_stride * 4,
                down = in(reg) self.b_stride * 4 * 16,
                steps = inout(reg) self.k / TILE => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Float;
    use crate::cpu::Level;
    use crate::cpu::amx_tiles::TileConfig;
    use half::bf16;

    #[test]
    fn products_of_integers_are_exact() {
        if Level::of_this_machine() < Level::Amx {
            return;
        }
        for ([m, n, k], accumulate) in
            [([32, 32, 32], false), ([32, 96, 64], true), ([64, 32, 128], true)]
        {
            let number = |i: usize| ((i * 7919) % 17) as f32 - 8.0;
            let a: Vec<u16> = (0..m * k).map(|i| bf16::round_from(number(i)).to_bits()).collect();
            let half =
                |i: usize, j: usize| u32::from(bf16::round_from(number(i * n + j + 3)).to_bits());
            let b: Vec<u32> = (0..k / 2 * n)
                .map(|i| (i / n * 2, i % n))
                .map(|(i, j)| half(i, j) | half(i + 1, j) << 16)
                .collect();
            let mut c = vec![5.0f32; m * n];
            // SAFETY: the machine has AMX, and the slices have the sizes given.
            unsafe {
                let _tiles = TileConfig::load();
                let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
                Product { m, n, k, a, a_stride: k, b, b_stride: n, c, c_stride: n, accumulate }
                    .run();
            }
            for (at, c) in c.into_iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let sum: f32 = (0..k).map(|x| number(i * k + x) * number(x * n + j + 3)).sum();
                assert_eq!(
                    c,
                    sum + if accumulate { 5.0 } else { 0.0 },
                    "({i}, {j}) of {m} x {n} x {k}"
                );
            }
        }
    }
}
