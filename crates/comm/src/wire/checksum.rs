//! Checksum of the bodies of messages. As sensitive as a CRC, but several times faster: next to TCP, CRC32C would cost a
//! tenth of the throughput on CPUs without wide carry-less multiplication.
//!
//! The input is cut into stripes of 16 words. Each of the 16 lanes sums its words twice: `a` is rotated by a bit before
//! each addition, so that equal changes at different places do not cancel, and `b` sums all values of `a`, so that what
//! cancels in `a` later remains visible. The value is the CRC32C of all sums and of the bytes after the last stripe:
//! other changes than a flipped bit or two are missed once in four billion.

use super::crc32c::crc32c;

const LANES: usize = 16;
const STRIPE: usize = 8 * LANES;

/// A checksum in progress.
#[derive(Clone)]
pub(crate) struct Checksum {
    sums: Sums,
    has_stripes: bool,
    /// Bytes that are less than a stripe.
    rest: [u8; STRIPE],
    held: usize,
}

#[derive(Clone, Copy)]
struct Sums {
    a: [u64; LANES],
    b: [u64; LANES],
}

impl Checksum {
    pub(crate) fn new() -> Checksum {
        let sums = Sums { a: [0; LANES], b: [0; LANES] };
        Checksum { sums, has_stripes: false, rest: [0; STRIPE], held: 0 }
    }

    /// Adds the next bytes; it does not matter how the input is cut.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        if self.held > 0 {
            let fill = bytes.len().min(STRIPE - self.held);
            self.rest[self.held..self.held + fill].copy_from_slice(&bytes[..fill]);
            (self.held, bytes) = (self.held + fill, &bytes[fill..]);
            if self.held < STRIPE {
                return;
            }
            let stripe = self.rest;
            self.add(&[stripe]);
            self.held = 0;
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        self.add(stripes);
        self.rest[..rest.len()].copy_from_slice(rest);
        self.held = rest.len();
    }

    pub(crate) fn value(&self) -> u32 {
        let mut crc = 0;
        if self.has_stripes {
            let mut sums = [0; 2 * STRIPE];
            let words = self.sums.a.iter().chain(&self.sums.b);
            for (to, word) in sums.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&word.to_le_bytes());
            }
            crc = crc32c(crc, &sums);
        }
        crc32c(crc, &self.rest[..self.held])
    }

    fn add(&mut self, stripes: &[[u8; STRIPE]]) {
        self.has_stripes |= !stripes.is_empty();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the CPU has the instructions of the called function.
                return unsafe { x86::add_avx512(&mut self.sums, stripes) };
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: as above.
                return unsafe { x86::add_avx2(&mut self.sums, stripes) };
            }
        }
        add_stripes(&mut self.sums, stripes);
    }
}

fn add_stripes(sums: &mut Sums, stripes: &[[u8; STRIPE]]) {
    let Sums { mut a, mut b } = *sums;
    for stripe in stripes {
        let (words, _) = stripe.as_chunks::<8>();
        for lane in 0..LANES {
            a[lane] = a[lane].rotate_left(1).wrapping_add(u64::from_le_bytes(words[lane]));
            b[lane] = b[lane].wrapping_add(a[lane]);
        }
    }
    *sums = Sums { a, b };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{STRIPE, Sums};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn add_avx512(sums: &mut Sums, stripes: &[[u8; STRIPE]]) {
        // SAFETY: the arrays have room for two vectors, and the accesses are unaligned.
        let vectors = |from: *const u8| unsafe {
            [0, 1].map(|i| _mm512_loadu_si512(from.cast::<__m512i>().add(i)))
        };
        let mut a = vectors(sums.a.as_ptr().cast());
        let mut b = vectors(sums.b.as_ptr().cast());
        for stripe in stripes {
            let words = vectors(stripe.as_ptr());
            for i in 0..2 {
                a[i] = _mm512_add_epi64(_mm512_rol_epi64::<1>(a[i]), words[i]);
                b[i] = _mm512_add_epi64(b[i], a[i]);
            }
        }
        for i in 0..2 {
            // SAFETY: as above.
            unsafe {
                _mm512_storeu_si512(sums.a.as_mut_ptr().cast::<__m512i>().add(i), a[i]);
                _mm512_storeu_si512(sums.b.as_mut_ptr().cast::<__m512i>().add(i), b[i]);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn add_avx2(sums: &mut Sums, stripes: &[[u8; STRIPE]]) {
        // SAFETY: the arrays have room for four vectors, and the accesses are unaligned.
        let load = |from: *const u8, i: usize| unsafe {
            _mm256_loadu_si256(from.cast::<__m256i>().add(i))
        };
        let vectors = |from: *const u8| [0, 1, 2, 3].map(|i| load(from, i));
        let mut a = vectors(sums.a.as_ptr().cast());
        let mut b = vectors(sums.b.as_ptr().cast());
        for stripe in stripes {
            let words = vectors(stripe.as_ptr());
            for i in 0..4 {
                let rotated =
                    _mm256_or_si256(_mm256_slli_epi64::<1>(a[i]), _mm256_srli_epi64::<63>(a[i]));
                a[i] = _mm256_add_epi64(rotated, words[i]);
                b[i] = _mm256_add_epi64(b[i], a[i]);
            }
        }
        for i in 0..4 {
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_si256(sums.a.as_mut_ptr().cast::<__m256i>().add(i), a[i]);
                _mm256_storeu_si256(sums.b.as_mut_ptr().cast::<__m256i>().add(i), b[i]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(bytes: &[u8]) -> u32 {
        let mut checksum = Checksum::new();
        checksum.update(bytes);
        checksum.value()
    }

    /// Bytes without a pattern.
    fn noise(len: usize) -> Vec<u8> {
        let mut x = 1u64;
        (0..len)
            .map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (x >> 56) as u8
            })
            .collect()
    }

    #[test]
    fn all_versions_are_equal_and_cuts_do_not_matter() {
        let bytes = noise(5000);
        for len in (0..600).chain([4096, 4999]) {
            let whole = checksum(&bytes[..len]);
            let mut plain = Sums { a: [0; LANES], b: [0; LANES] };
            let (stripes, rest) = bytes[..len].as_chunks::<STRIPE>();
            add_stripes(&mut plain, stripes);
            let mut expected = Checksum { sums: plain, ..Checksum::new() };
            expected.has_stripes = !stripes.is_empty();
            expected.rest[..rest.len()].copy_from_slice(rest);
            expected.held = rest.len();
            assert_eq!(whole, expected.value(), "{len}");
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the CPU has the instructions.
                unsafe { x86::add_avx2(&mut expected.sums, stripes) };
                add_stripes(&mut plain, stripes);
                assert_eq!((expected.sums.a, expected.sums.b), (plain.a, plain.b), "{len}");
            }
            for piece in [1, 7, 64, 129, 1000] {
                let mut cut = Checksum::new();
                bytes[..len].chunks(piece).for_each(|piece| cut.update(piece));
                assert_eq!(cut.value(), whole, "{len} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn flipped_bits_and_moved_blocks_change_the_value() {
        let mut bytes = noise(1500);
        let whole = checksum(&bytes);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(checksum(&bytes), whole, "bit {bit}");
            // And a second one, in the same lane, where it cancels in one of the sums if anywhere.
            for (distance, turn) in [(1, 0), (1, 1), (2, 2), (4, 0), (8, 7), (3, 3)] {
                let other = (bit + 8 * STRIPE * distance + turn) % (8 * bytes.len());
                bytes[other / 8] ^= 1 << (other % 8);
                assert_ne!(checksum(&bytes), whole, "bits {bit} and {other}");
                bytes[other / 8] ^= 1 << (other % 8);
            }
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for (one, other) in [(0, 1), (0, 2), (3, 9), (1, 5)] {
            let mut moved = bytes.clone();
            moved.copy_within(one * STRIPE..(one + 1) * STRIPE, other * STRIPE);
            assert_ne!(checksum(&moved), whole);
            moved[one * STRIPE..(one + 1) * STRIPE]
                .copy_from_slice(&bytes[other * STRIPE..(other + 1) * STRIPE]);
            assert_ne!(checksum(&moved), whole, "stripes {one} and {other} are exchanged");
        }
    }
}
