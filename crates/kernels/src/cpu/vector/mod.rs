//! A row of numbers in one register, at each level, and the way a job gets to run on it. Knows nothing of
//! attention.

mod plain;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::cpu::Level;
use plain::Plain;

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
