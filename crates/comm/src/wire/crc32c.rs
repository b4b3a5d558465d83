//! CRC32C (Castagnoli), the checksum of frames and messages. It detects every change of up to three bits in
//! 256 MiB, every burst of up to 32 bits, and all but one in four billion other changes.
//!
//! Fast enough to be invisible next to a copy: long inputs are folded with carry-less multiplications (Gopal et
//! al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"), the rest goes through the
//! CRC instruction of the CPU. All versions return the same value.

/// The polynomial, lowest degree in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// Checksum of `bytes` that follow data with checksum `before`; 0 is the checksum of nothing.
///
/// ```
/// use lockstep_comm::crc32c;
/// assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
/// assert_eq!(crc32c(crc32c(0, b"1234"), b"56789"), 0xe306_9283);
/// ```
pub fn crc32c(before: u32, bytes: &[u8]) -> u32 {
    !update(!before, bytes)
}

#[cfg(target_arch = "x86_64")]
fn update(crc: u32, bytes: &[u8]) -> u32 {
    let has_crc = is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq");
    let is_wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
    match () {
        // SAFETY: the CPU has the instructions of the called function.
        () if has_crc && is_wide => unsafe { x86::update_avx512(crc, bytes) },
        // SAFETY: as above.
        () if has_crc => unsafe { x86::update_sse(crc, bytes) },
        () => portable(crc, bytes),
    }
}

#[cfg(target_arch = "aarch64")]
fn update(crc: u32, bytes: &[u8]) -> u32 {
    #[target_feature(enable = "crc")]
    fn with_crc(mut crc: u32, bytes: &[u8]) -> u32 {
        use std::arch::aarch64::{__crc32cb, __crc32cd};
        let (words, rest) = bytes.as_chunks::<8>();
        crc = words.iter().fold(crc, |crc, word| __crc32cd(crc, u64::from_le_bytes(*word)));
        rest.iter().fold(crc, |crc, byte| __crc32cb(crc, *byte))
    }
    match std::arch::is_aarch64_feature_detected!("crc") {
        // SAFETY: the CPU has the instructions of the called function.
        true => unsafe { with_crc(crc, bytes) },
        false => portable(crc, bytes),
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn update(crc: u32, bytes: &[u8]) -> u32 {
    portable(crc, bytes)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::power_of_x;
    use std::arch::x86_64::*;

    /// Multipliers that move a lane of 128 bits by `bits`: for its first and its second half.
    const fn fold_by(bits: u32) -> [u64; 2] {
        [(power_of_x(bits + 32) as u64) << 1, (power_of_x(bits - 32) as u64) << 1]
    }

    #[target_feature(enable = "sse4.2")]
    pub(super) fn update_by_words(crc: u32, bytes: &[u8]) -> u32 {
        let (words, rest) = bytes.as_chunks::<8>();
        let crc = words
            .iter()
            .fold(u64::from(crc), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)))
            as u32;
        rest.iter().fold(crc, |crc, byte| _mm_crc32_u8(crc, *byte))
    }

    /// Folds four vectors of 128 bits at a time.
    #[target_feature(enable = "sse4.2,pclmulqdq")]
    pub(super) fn update_sse(crc: u32, bytes: &[u8]) -> u32 {
        let (blocks, rest) = bytes.as_chunks::<64>();
        let Some((first, blocks)) = blocks.split_first() else {
            return update_by_words(crc, bytes);
        };
        // SAFETY: a block has room for four vectors, and unaligned loads are used.
        let load = |block: &[u8; 64], i: usize| unsafe {
            _mm_loadu_si128(block.as_ptr().cast::<__m128i>().add(i))
        };
        let fold = |x: __m128i, by: [u64; 2], next: __m128i| {
            let k = _mm_set_epi64x(by[1] as i64, by[0] as i64);
            let halves = _mm_xor_si128(
                _mm_clmulepi64_si128::<0x00>(x, k),
                _mm_clmulepi64_si128::<0x11>(x, k),
            );
            _mm_xor_si128(halves, next)
        };
        let mut sums = [load(first, 0), load(first, 1), load(first, 2), load(first, 3)];
        sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(crc as i32));
        const NEXT: [u64; 2] = fold_by(512);
        for block in blocks {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = fold(*sum, NEXT, load(block, i));
            }
        }
        const LANE: [u64; 2] = fold_by(128);
        let [a, b, c, d] = sums;
        let sum = fold(fold(fold(a, LANE, b), LANE, c), LANE, d);
        let mut left = [0; 16];
        // SAFETY: the array has room for a vector, and the store is unaligned.
        unsafe { _mm_storeu_si128(left.as_mut_ptr().cast(), sum) };
        update_by_words(update_by_words(0, &left), rest)
    }

    /// Folds four vectors of 512 bits at a time.
    #[target_feature(enable = "avx512f,vpclmulqdq,sse4.2,pclmulqdq")]
    pub(super) fn update_avx512(crc: u32, bytes: &[u8]) -> u32 {
        let (blocks, rest) = bytes.as_chunks::<256>();
        let Some((first, blocks)) = blocks.split_first() else {
            return update_sse(crc, bytes);
        };
        // SAFETY: a block has room for four vectors, and unaligned loads are used.
        let load = |block: &[u8; 256], i: usize| unsafe {
            _mm512_loadu_si512(block.as_ptr().cast::<__m512i>().add(i))
        };
        let fold = |x: __m512i, by: [u64; 2], next: __m512i| {
            let k = _mm512_broadcast_i32x4(_mm_set_epi64x(by[1] as i64, by[0] as i64));
            let first = _mm512_clmulepi64_epi128::<0x00>(x, k);
            let second = _mm512_clmulepi64_epi128::<0x11>(x, k);
            // Exclusive or of three values.
            _mm512_ternarylogic_epi64::<0x96>(first, second, next)
        };
        let mut sums = [load(first, 0), load(first, 1), load(first, 2), load(first, 3)];
        let start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(crc as i32));
        sums[0] = _mm512_xor_si512(sums[0], start);
        const NEXT: [u64; 2] = fold_by(2048);
        for block in blocks {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = fold(*sum, NEXT, load(block, i));
            }
        }
        const VECTOR: [u64; 2] = fold_by(512);
        let [a, b, c, d] = sums;
        let sum = fold(fold(fold(a, VECTOR, b), VECTOR, c), VECTOR, d);
        let mut left = [0; 64];
        // SAFETY: the array has room for a vector, and the store is unaligned.
        unsafe { _mm512_storeu_si512(left.as_mut_ptr().cast(), sum) };
        update_sse(update_by_words(0, &left), rest)
    }
}

/// x to the power of `n`, modulo the polynomial.
const fn power_of_x(n: u32) -> u32 {
    let (mut power, mut i) = (1u32 << 31, 0);
    while i < n {
        power = times_x(power);
        i += 1;
    }
    power
}

const fn times_x(polynomial: u32) -> u32 {
    (polynomial >> 1) ^ (if polynomial & 1 == 1 { POLYNOMIAL } else { 0 })
}

/// Eight bytes at a time through tables.
fn portable(mut crc: u32, bytes: &[u8]) -> u32 {
    /// `TABLES[n][b]` is the effect of byte `b` after `n` more bytes.
    static TABLES: [[u32; 256]; 8] = tables();
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let word = u64::from_le_bytes(*word) ^ u64::from(crc);
        crc = (0..8).fold(0, |crc, i| crc ^ TABLES[7 - i][(word >> (8 * i)) as u8 as usize]);
    }
    rest.iter().fold(crc, |crc, byte| (crc >> 8) ^ TABLES[0][(crc as u8 ^ byte) as usize])
}

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit, mut n) = (byte as u32, 0, 0);
        while n < 8 {
            while bit < 8 * (n + 1) {
                crc = times_x(crc);
                bit += 1;
            }
            tables[n][byte] = crc;
            n += 1;
        }
        byte += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, bit by bit.
    fn reference(mut crc: u32, bytes: &[u8]) -> u32 {
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = times_x(crc);
            }
        }
        crc
    }

    fn versions() -> Vec<fn(u32, &[u8]) -> u32> {
        let mut versions: Vec<fn(u32, &[u8]) -> u32> = vec![portable, update];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq") {
            // SAFETY: the CPU has the instructions.
            versions.push(|crc, bytes| unsafe { x86::update_sse(crc, bytes) });
        }
        versions
    }

    #[test]
    fn all_versions_equal_the_definition() {
        let bytes: Vec<u8> =
            (0..3000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for version in versions() {
            for len in (0..600).chain([1023, 1024, 2047, 2999]) {
                for (start, crc) in [(0, 0), (1, u32::MAX), (len % 7, 0x1234_5678)] {
                    let part = &bytes[start.min(bytes.len() - len)..][..len];
                    assert_eq!(version(crc, part), reference(crc, part), "{len} from {start}");
                }
            }
        }
    }

    #[test]
    fn every_flipped_bit_changes_the_checksum() {
        let mut bytes = vec![0x5a; 700];
        let whole = crc32c(0, &bytes);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(crc32c(0, &bytes), whole, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
