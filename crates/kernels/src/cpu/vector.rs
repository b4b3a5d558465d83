//! A row of numbers in one register, at each level, and the way a job gets to run on it. Knows nothing of
//! attention.

use crate::cpu::Level;

/// What the tiles need of a register of f32.
///
/// # Safety
/// Every function may be called only where the level's instructions may run: inside a `Job` that `run` has
/// started. Loads and stores touch `LANES` elements, wherever they are aligned.
pub(super) trait Vector: Copy {
    const LANES: usize;
    /// How many rows of how many registers a product keeps in registers, by how many it goes across.
    const TALL: [usize; 5];
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * by + plus`
    unsafe fn mul_add(self, by: Self, plus: Self) -> Self;
    /// The larger; where either is a NaN, `other`.
    unsafe fn max(self, other: Self) -> Self;
    /// Two to the power of numbers up to 127; nought below about -126.
    unsafe fn exp2(self) -> Self;
    /// `yes` where `self >= least`, else `no`.
    unsafe fn where_at_least(self, least: f32, yes: Self, no: Self) -> Self;
    /// Two numbers rounded to bf16 in each lane, `low` in the lower half. Halves round away from nought.
    unsafe fn pair(low: Self, high: Self) -> Self;
    /// Stores both, one after the other, rounded to bf16 in the same way.
    unsafe fn store_halves(first: Self, second: Self, to: *mut u16);
    /// Turns a square of `LANES` rows: row i of `from` becomes column i of `to`.
    unsafe fn turn(from: *const f32, from_step: usize, to: *mut f32, to_step: usize);
}

/// Work on vectors of whatever width the level has. Bodies are `#[inline(always)]` all the way down, so that
/// they are compiled once per level, with that level's instructions.
pub(super) trait Job {
    /// # Safety
    /// As the job's fields say.
    unsafe fn on<V: Vector>(self);
}

/// Runs a job with the instructions of a level.
///
/// # Safety
/// As the job's fields say; and the processor must have the level, which `Cpu::at` has checked.
#[inline(always)]
pub(super) unsafe fn run<J: Job>(level: Level, job: J) {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx | Level::Avx512 => x86::on_avx512(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => x86::on_avx2(job),
            _ => job.on::<Plain>(),
        }
    }
}

/// Asks for the cache lines of some elements, to be read or written soon. Rows of a fused matrix are pages
/// apart, which the processor does not foresee by itself.
#[inline(always)]
pub(super) fn soon<T>(from: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for byte in (0..len * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has the instruction, and it reads nothing: any address will do.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(byte)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, len);
}

/// How many rows ahead to ask.
pub(super) const AHEAD: usize = 12;

/// 2^r = sum of `POWERS[i] r^i` for -1/2 <= r <= 1/2, within 2e-9 of it (a Remez fit of the relative error,
/// with the first coefficient set to one so that 2^0 is one).
const POWERS: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2, // 0.693147206 fitted: the same f32
    0.240_226_47,
    0.055_503_29,
    0.009_618_489,
    0.001_339_993_2,
    0.000_153_458_27,
];

/// Adding it leaves a number's nearest whole in the lowest bits.
const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23

/// Least exponent of a number that is not subnormal.
const LEAST: f32 = -126.0;

/// Half of a bf16's last place, in the bits of an f32.
const HALF: u32 = 0x8000;

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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{HALF, Job, LEAST, POWERS, Vector, WHOLE};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn on_avx2<J: Job>(job: J) {
        // SAFETY: the caller's promise, handed on.
        unsafe { job.on::<Avx2>() }
    }

    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn on_avx512<J: Job>(job: J) {
        // SAFETY: the caller's promise, handed on.
        unsafe { job.on::<Avx512>() }
    }

    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256);
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(__m512);

    // In both implementations each block is sound because the trait lets it be called only where the
    // instructions may run; the pointers are those that the caller vouches for.

    impl Vector for Avx2 {
        const LANES: usize = 8;
        const TALL: [usize; 5] = [0, 8, 6, 0, 0];

        #[inline(always)]
        unsafe fn splat(x: f32) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Avx2) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Avx2) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Avx2) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, by: Avx2, plus: Avx2) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_fmadd_ps(self.0, by.0, plus.0) })
        }
        #[inline(always)]
        unsafe fn max(self, other: Avx2) -> Avx2 {
            // SAFETY: see above.
            Avx2(unsafe { _mm256_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn exp2(self) -> Avx2 {
            // SAFETY: see above.
            unsafe {
                let marked = _mm256_add_ps(self.0, _mm256_set1_ps(WHOLE));
                let rest = _mm256_sub_ps(self.0, _mm256_sub_ps(marked, _mm256_set1_ps(WHOLE)));
                let mut power = _mm256_set1_ps(POWERS[6]);
                for c in POWERS[..6].iter().rev() {
                    power = _mm256_fmadd_ps(power, rest, _mm256_set1_ps(*c));
                }
                let shift = _mm256_slli_epi32::<23>(_mm256_castps_si256(marked));
                let scaled =
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(power), shift));
                // A NaN compares as not less, and is put back by x - x.
                let scaled = _mm256_add_ps(scaled, _mm256_sub_ps(self.0, self.0));
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(self.0, _mm256_set1_ps(LEAST)), scaled)
                    .into()
            }
        }
        #[inline(always)]
        unsafe fn where_at_least(self, least: f32, yes: Avx2, no: Avx2) -> Avx2 {
            // SAFETY: see above.
            unsafe {
                let reached = _mm256_cmp_ps::<_CMP_GE_OQ>(self.0, _mm256_set1_ps(least));
                _mm256_blendv_ps(no.0, yes.0, reached).into()
            }
        }
        #[inline(always)]
        unsafe fn pair(low: Avx2, high: Avx2) -> Avx2 {
            // SAFETY: see above.
            unsafe {
                let half = _mm256_set1_epi32(HALF as i32);
                let low =
                    _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_castps_si256(low.0), half));
                let high = _mm256_add_epi32(_mm256_castps_si256(high.0), half);
                _mm256_castsi256_ps(_mm256_blend_epi16::<0xaa>(low, high)).into()
            }
        }
        #[inline(always)]
        unsafe fn store_halves(first: Avx2, second: Avx2, to: *mut u16) {
            // SAFETY: see above.
            unsafe {
                let half = _mm256_set1_epi32(HALF as i32);
                let top = |x: __m256| {
                    _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_castps_si256(x), half))
                };
                let mixed = _mm256_packus_epi32(top(first.0), top(second.0));
                _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0xd8>(mixed));
            }
        }
        #[inline(always)]
        unsafe fn turn(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
            // SAFETY: see above.
            unsafe {
                let mut rows = [_mm256_setzero_ps(); 8];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm256_loadu_ps(from.add(i * from_step));
                }
                // Pairs, then fours, then the two halves.
                let mut pairs = rows;
                for i in 0..4 {
                    pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                    pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
                }
                let mut fours = rows;
                for i in 0..2 {
                    for j in 0..2 {
                        let (a, b) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                        fours[4 * i + 2 * j] = _mm256_shuffle_ps::<0x44>(a, b);
                        fours[4 * i + 2 * j + 1] = _mm256_shuffle_ps::<0xee>(a, b);
                    }
                }
                for j in 0..4 {
                    let (a, b) = (fours[j], fours[j + 4]);
                    _mm256_storeu_ps(to.add(j * to_step), _mm256_permute2f128_ps::<0x20>(a, b));
                    _mm256_storeu_ps(
                        to.add((j + 4) * to_step),
                        _mm256_permute2f128_ps::<0x31>(a, b),
                    );
                }
            }
        }
    }

    impl From<__m256> for Avx2 {
        #[inline(always)]
        fn from(register: __m256) -> Avx2 {
            Avx2(register)
        }
    }

    impl Vector for Avx512 {
        const LANES: usize = 16;
        const TALL: [usize; 5] = [0, 8, 8, 8, 6];

        #[inline(always)]
        unsafe fn splat(x: f32) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_loadu_ps(from) })
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Avx512) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, other: Avx512) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, other: Avx512) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn mul_add(self, by: Avx512, plus: Avx512) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
        }
        #[inline(always)]
        unsafe fn max(self, other: Avx512) -> Avx512 {
            // SAFETY: see above.
            Avx512(unsafe { _mm512_max_ps(self.0, other.0) })
        }
        #[inline(always)]
        unsafe fn exp2(self) -> Avx512 {
            // SAFETY: see above.
            unsafe {
                const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
                let whole = _mm512_roundscale_ps::<NEAREST>(self.0);
                let rest = _mm512_sub_ps(self.0, whole);
                let mut power = _mm512_set1_ps(POWERS[6]);
                for c in POWERS[..6].iter().rev() {
                    power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(*c));
                }
                // Lanes that would come out subnormal are left out beforehand: one of them costs more than
                // a hundred others. A NaN is not less than anything, so it stays.
                let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(LEAST));
                Avx512(_mm512_maskz_scalef_ps(normal, power, whole))
            }
        }
        #[inline(always)]
        unsafe fn where_at_least(self, least: f32, yes: Avx512, no: Avx512) -> Avx512 {
            // SAFETY: see above.
            unsafe {
                let reached = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(self.0, _mm512_set1_ps(least));
                Avx512(_mm512_mask_blend_ps(reached, no.0, yes.0))
            }
        }
        #[inline(always)]
        unsafe fn pair(low: Avx512, high: Avx512) -> Avx512 {
            // SAFETY: see above.
            unsafe {
                let half = _mm512_set1_epi32(HALF as i32);
                let low =
                    _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(low.0), half));
                let high = _mm512_add_epi32(_mm512_castps_si512(high.0), half);
                Avx512(_mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, high)))
            }
        }
        #[inline(always)]
        unsafe fn store_halves(first: Avx512, second: Avx512, to: *mut u16) {
            // SAFETY: see above.
            unsafe {
                let half = _mm512_set1_epi32(HALF as i32);
                let first = _mm512_add_epi32(_mm512_castps_si512(first.0), half);
                let second = _mm512_add_epi32(_mm512_castps_si512(second.0), half);
                // The upper halves of all lanes, the first's and then the second's.
                let uppers = _mm512_set_epi16(
                    63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                    23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                );
                let both = _mm512_permutex2var_epi16(first, uppers, second);
                _mm512_storeu_si512(to.cast(), both);
            }
        }
        #[inline(always)]
        unsafe fn turn(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
            // SAFETY: see above.
            unsafe {
                let mut rows = [_mm512_setzero_ps(); 16];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm512_loadu_ps(from.add(i * from_step));
                }
                // Within quarters of registers: pairs, then fours.
                let mut pairs = rows;
                for i in 0..8 {
                    pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                    pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
                }
                let mut fours = rows;
                for i in 0..4 {
                    for j in 0..2 {
                        let (a, b) = (pairs[4 * i + j], pairs[4 * i + 2 + j]);
                        fours[4 * i + 2 * j] = _mm512_shuffle_ps::<0x44>(a, b);
                        fours[4 * i + 2 * j + 1] = _mm512_shuffle_ps::<0xee>(a, b);
                    }
                }
                // Quarter q of fours[4 i + j] is column 4 q + j of rows 4 i to 4 i + 3; quarters are put
                // where they belong.
                for j in 0..4 {
                    let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
                    let (ab_low, ab_high) =
                        (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                    let (cd_low, cd_high) =
                        (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                    let columns = [
                        _mm512_shuffle_f32x4::<0x88>(ab_low, cd_low),
                        _mm512_shuffle_f32x4::<0xdd>(ab_low, cd_low),
                        _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high),
                        _mm512_shuffle_f32x4::<0xdd>(ab_high, cd_high),
                    ];
                    for (q, column) in columns.into_iter().enumerate() {
                        _mm512_storeu_ps(to.add((4 * q + j) * to_step), column);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job's function, at every level of this machine.
    fn at_every_level(check: impl Fn(Level)) {
        Level::of_this_machine().and_below().for_each(check);
    }

    struct Exp2<'a>(&'a mut [f32]);

    impl Job for Exp2<'_> {
        #[inline(always)]
        unsafe fn on<V: Vector>(self) {
            for chunk in self.0.chunks_exact_mut(V::LANES) {
                // SAFETY: a chunk is as long as a vector.
                unsafe { V::load(chunk.as_ptr()).exp2().store(chunk.as_mut_ptr()) };
            }
        }
    }

    #[test]
    fn powers_of_two_are_within_two_ulps() {
        at_every_level(|level| {
            let exponents: Vec<f32> = (0..1 << 16).map(|i| i as f32 * -0.001_922 + 0.3).collect();
            let mut powers = exponents.clone();
            // SAFETY: the level is this machine's.
            unsafe { run(level, Exp2(&mut powers)) };
            for (x, power) in exponents.iter().zip(powers) {
                let exact = f64::from(*x).exp2();
                let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                let apart = (f64::from(power) - exact).abs();
                assert!(
                    apart <= 2.0 * ulp,
                    "2^{x} is {power:e} at {level:?}: {} ulps off",
                    apart / ulp
                );
            }
        });
    }

    #[test]
    fn powers_of_two_at_the_edges() {
        at_every_level(|level| {
            let mut edges = [0.0; 16];
            edges[..6].copy_from_slice(&[0.0, -1.0, -127.0, -1e30, f32::NEG_INFINITY, f32::NAN]);
            // SAFETY: the level is this machine's.
            unsafe { run(level, Exp2(&mut edges)) };
            assert_eq!(edges[..5], [1.0, 0.5, 0.0, 0.0, 0.0], "at {level:?}");
            assert!(edges[5].is_nan(), "at {level:?}");
        });
    }

    /// Turns a square, then pairs and halves its first two rows.
    struct Moves<'a> {
        from: &'a [f32],       // (16, 20)
        turned: &'a mut [f32], // (16, 24)
        paired: &'a mut [u32],
        halves: &'a mut [u16],
        lanes: &'a mut usize,
    }

    impl Job for Moves<'_> {
        #[inline(always)]
        unsafe fn on<V: Vector>(self) {
            *self.lanes = V::LANES;
            // SAFETY: every slice is as large as the widest vector needs.
            unsafe {
                V::turn(self.from.as_ptr(), 20, self.turned.as_mut_ptr(), 24);
                let (first, second) =
                    (V::load(self.from.as_ptr()), V::load(self.from.as_ptr().add(20)));
                V::pair(first, second).store(self.paired.as_mut_ptr().cast());
                V::store_halves(first, second, self.halves.as_mut_ptr());
            }
        }
    }

    #[test]
    fn squares_are_turned_and_halves_rounded() {
        at_every_level(|level| {
            let from: Vec<f32> = (0..16 * 20).map(|i| (i as f32 - 150.0) * 1.003).collect();
            let (mut turned, mut paired, mut halves) =
                (vec![0.0; 16 * 24], vec![0; 16], vec![0; 32]);
            let mut lanes = 0;
            let (to_turned, to_paired) = (&mut turned[..], &mut paired[..]);
            let moves = Moves {
                from: &from,
                turned: to_turned,
                paired: to_paired,
                halves: &mut halves,
                lanes: &mut lanes,
            };
            // SAFETY: the level is this machine's, and the slices are large enough for it.
            unsafe { run(level, moves) };
            for (i, j) in (0..lanes).flat_map(|i| (0..lanes).map(move |j| (i, j))) {
                assert_eq!(turned[j * 24 + i], from[i * 20 + j], "({i}, {j}) at {level:?}");
            }
            for i in 0..lanes {
                let [first, second] =
                    [from[i], from[20 + i]].map(|x| half::bf16::from_f32(x).to_bits());
                assert_eq!(
                    [halves[i], halves[lanes + i]],
                    [first, second],
                    "lane {i} at {level:?}"
                );
                assert_eq!(
                    paired[i],
                    u32::from(first) | u32::from(second) << 16,
                    "lane {i} at {level:?}"
                );
            }
        });
    }
}
