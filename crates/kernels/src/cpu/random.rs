//! Counter-based random numbers: Philox 4x32-10 (Salmon et al. 2011) with (seed, stream) as the key and the index of the
//! element as the counter. Stateless: any slice of a tensor gets the numbers of the whole tensor, on any layout and any
//! number of threads.

use super::Cpu;
use super::math::log;
use super::partition::{GRAIN_SIZE, by_rows, parallel_for};
use super::simd::{Isa, Portable, multiversion};
use crate::{Float, RandomKey};
use std::ops::Range;

/// Counters that are computed together; each gives four words.
const SIDE: usize = 64;

/// Indices of a group of counters: word w of counter c is index `w * SIDE + c` of the group.
pub(crate) const GROUP: usize = 4 * SIDE;

impl RandomKey {
    /// The 32 random bits of one index.
    pub fn word(self, index: u64) -> u32 {
        let within = (index % GROUP as u64) as usize;
        philox(self, index / GROUP as u64 * SIDE as u64 + (within % SIDE) as u64)[within / SIDE]
    }
}

/// Normal numbers with mean 0 and standard deviation `std` (Box–Muller), with the same bits at every level.
pub fn normal<E: Float>(cpu: &Cpu, key: RandomKey, first: u64, out: &mut [E], std: f32) {
    parallel_for(&cpu.team, out.len(), GRAIN_SIZE, by_rows(out, 1), |range, out| {
        by_group(first + range.start as u64, range.len(), |at, skip, part| {
            normal_group(cpu.level, key, at, skip, &mut out[part], std);
        });
    });
}

/// Ten rounds of Philox on the counter (count, stream) under the key (seed).
#[inline(always)]
fn philox(key: RandomKey, count: u64) -> [u32; 4] {
    rounds(
        [count as u32, (count >> 32) as u32, key.stream as u32, (key.stream >> 32) as u32],
        key.seed,
    )
}

#[inline(always)]
fn rounds([mut a, mut b, mut c, mut d]: [u32; 4], key: u64) -> [u32; 4] {
    let (mut low, mut high) = (key as u32, (key >> 32) as u32);
    for _ in 0..10 {
        let (x, y) = (a as u64 * 0xd251_1f53, c as u64 * 0xcd9e_8d57);
        (a, b, c, d) =
            ((y >> 32) as u32 ^ b ^ low, y as u32, (x >> 32) as u32 ^ d ^ high, x as u32);
        low = low.wrapping_add(0x9e37_79b9);
        high = high.wrapping_add(0xbb67_ae85);
    }
    [a, b, c, d]
}

/// All words of one group, in the order of their indices.
#[inline(always)]
pub(crate) fn group(key: RandomKey, group: u64) -> [u32; GROUP] {
    let mut words = [0; GROUP];
    let (a, rest) = words.split_at_mut(SIDE);
    let (b, rest) = rest.split_at_mut(SIDE);
    let (c, d) = rest.split_at_mut(SIDE);
    for i in 0..SIDE {
        [a[i], b[i], c[i], d[i]] = philox(key, group * SIDE as u64 + i as u64);
    }
    words
}

/// Divides `len` indices from `first` on into groups: calls `work` with the group, the offset in it, and the range.
pub(crate) fn by_group(first: u64, len: usize, mut work: impl FnMut(u64, usize, Range<usize>)) {
    let mut from = 0;
    while from < len {
        let index = first + from as u64;
        let skip = (index % GROUP as u64) as usize;
        let to = (from + GROUP - skip).min(len);
        work(index / GROUP as u64, skip, from..to);
        from = to;
    }
}

/// Normal numbers of a group. Words of the first and second quarter form pairs, and those of the third and fourth; the
/// first of a pair gives the radius, the second the angle.
#[inline(always)]
fn normals(words: &[u32; GROUP], std: f32) -> [f32; GROUP] {
    let mut out = [0.0; GROUP];
    for (words, out) in words.chunks_exact(2 * SIDE).zip(out.chunks_exact_mut(2 * SIDE)) {
        let ((radii, turns), (x, y)) = (words.split_at(SIDE), out.split_at_mut(SIDE));
        for i in 0..SIDE {
            // In 2^-33 to 1, never 0.
            let u = radii[i] as f32 * 2f32.powi(-32) + 2f32.powi(-33);
            let radius = (-2.0 * log::<Portable>(u)).sqrt() * std;
            let (sin, cos) = sin_cos(turns[i] as i32 as f32 * 2f32.powi(-32));
            (x[i], y[i]) = (radius * cos, radius * sin);
        }
    }
    out
}

/// Sine and cosine of a fraction of a turn, from -1/2 to 1/2, with an error of 2e-7.
#[inline(always)]
fn sin_cos(turn: f32) -> (f32, f32) {
    // Beyond a quarter turn, mirror: the sine is the same and the cosine changes its sign.
    let mirrored = turn.abs() > 0.25;
    let t = if mirrored { 0.5f32.copysign(turn) - turn } else { turn };
    let s = t * t;
    let sin = [-14.393_966, 42.009_78, -76.704_28, 81.605_225, -41.341_7, std::f32::consts::TAU];
    let cos = [-24.981_435, 60.143_89, -85.453_57, 64.939_35, -19.739_208, 1.0];
    let cos = polynomial(cos, s);
    (polynomial(sin, s) * t, if mirrored { -cos } else { cos })
}

/// A polynomial of `s`, highest power first.
#[inline(always)]
fn polynomial([a, b, c, d, e, f]: [f32; 6], s: f32) -> f32 {
    Portable::fma(
        Portable::fma(Portable::fma(Portable::fma(Portable::fma(a, s, b), s, c), s, d), s, e),
        s,
        f,
    )
}

multiversion! {
    fn normal_group<I, E: Float>(key: RandomKey, at: u64, skip: usize, out: &mut [E], std: f32) {
        let normals = normals(&group(key, at), std);
        let normals = &normals[skip..][..out.len()];
        for i in 0..out.len() {
            out[i] = E::round_from(normals[i]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer tests of Random123 for philox4x32-10.
    #[test]
    fn philox_gives_the_published_words() {
        let digits = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        for (counter, key, words) in [
            ([0; 4], 0, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], u64::MAX, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (digits, 0x299f_31d0_a409_3822, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ] {
            assert_eq!(rounds(counter, key), words);
        }
    }
}
