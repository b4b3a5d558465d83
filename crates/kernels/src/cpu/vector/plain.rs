//! A vector that every target has.

use super::{HALF, LEAST, POWERS, Vector, WHOLE};

/// Eight numbers in plain Rust: what the compiler makes of it on any target.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

impl Vector for Plain {
    const LANES: usize = 8;
    const TALL: [usize; 5] = [0, 4, 2, 0, 0];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Plain {
        Plain([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Plain {
        // SAFETY: eight elements are there, as the trait asks.
        Plain(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: eight elements are there, as the trait asks.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Plain) -> Plain {
        Plain(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }
    #[inline(always)]
    unsafe fn mul_add(self, by: Plain, plus: Plain) -> Plain {
        // Where the target has no fused instruction, `f32::mul_add` is a call into a library.
        match cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            true => Plain(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], plus.0[i]))),
            false => Plain(std::array::from_fn(|i| self.0[i] * by.0[i] + plus.0[i])),
        }
    }
    #[inline(always)]
    unsafe fn max(self, other: Plain) -> Plain {
        Plain(std::array::from_fn(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Plain {
        Plain(std::array::from_fn(|i| {
            let x = self.0[i];
            let marked = x + WHOLE;
            let rest = x - (marked - WHOLE);
            let mut power = POWERS[6];
            for c in POWERS[..6].iter().rev() {
                power = power * rest + c;
            }
            let scaled = f32::from_bits(power.to_bits().wrapping_add(marked.to_bits() << 23));
            // Neither comparison holds for a NaN, which stays one.
            if x < LEAST {
                0.0
            } else if x >= LEAST {
                scaled
            } else {
                x
            }
        }))
    }
    #[inline(always)]
    unsafe fn where_at_least(self, least: f32, yes: Plain, no: Plain) -> Plain {
        Plain(std::array::from_fn(|i| if self.0[i] >= least { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    unsafe fn pair(low: Plain, high: Plain) -> Plain {
        Plain(std::array::from_fn(|i| {
            f32::from_bits(u32::from(half_of(low.0[i])) | u32::from(half_of(high.0[i])) << 16)
        }))
    }
    #[inline(always)]
    unsafe fn store_halves(first: Plain, second: Plain, to: *mut u16) {
        let halves: [[u16; 8]; 2] = [first.0.map(half_of), second.0.map(half_of)];
        // SAFETY: sixteen elements are there, as the trait asks.
        unsafe { to.cast::<[[u16; 8]; 2]>().write_unaligned(halves) }
    }
    #[inline(always)]
    unsafe fn turn(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the squares are there, as the trait asks.
                unsafe { *to.add(j * to_step + i) = *from.add(i * from_step + j) };
            }
        }
    }
}

#[inline(always)]
fn half_of(x: f32) -> u16 {
    (x.to_bits().wrapping_add(HALF) >> 16) as u16
}
