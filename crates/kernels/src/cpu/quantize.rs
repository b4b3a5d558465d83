//! Quantization of f32 to one or two bytes, with error feedback, for communication. Decides nothing about what is sent.
//!
//! NaN and infinity are never hidden: bf16 preserves them, and in codes with a scale their whole chunk becomes NaN.

use super::Cpu;
use super::partition::{GRAIN_SIZE, by_blocks, by_rows, parallel_for};
use super::simd::multiversion;
use crate::device::SCALE_CHUNK as CHUNK;
use crate::{Code, Float};
use half::bf16;

// Threads get whole chunks.
const _: () = assert!(GRAIN_SIZE.is_multiple_of(CHUNK));

impl Code {
    /// Rows to a scale, as `by_blocks` counts them.
    const fn per_scale(self) -> usize {
        if self.scale_bytes() == 0 { 1 } else { CHUNK }
    }

    /// Where the codes begin.
    fn start(self, n: usize, packed: usize) -> usize {
        let bytes = self.bytes(n);
        assert_eq!(packed, bytes, "{n} numbers in {self:?} take {bytes} bytes, not {packed}");
        bytes - self.code_bytes() * n
    }
}

/// Quantizes `x + error`, rounded to nearest; `error` becomes the rounding error, or zero if the sum is not finite.
pub fn quantize(cpu: &Cpu, code: Code, x: &[f32], error: &mut [f32], packed: &mut [u8]) {
    let n = x.len();
    assert_eq!(n, error.len());
    let (scales, codes) = packed.split_at_mut(code.start(n, packed.len()));
    let scales = by_blocks(scales, code.scale_bytes(), code.per_scale());
    let outputs = (by_rows(error, 1), scales, by_rows(codes, code.code_bytes()));
    parallel_for(&cpu.team, n, GRAIN_SIZE, outputs, |range, (error, scales, codes)| {
        let x = &x[range];
        match code {
            Code::Bf16 => quantize_bf16(cpu.level, x, error, codes),
            Code::F16 => quantize_f16(cpu.level, x, error, scales, codes),
            Code::Int8 => quantize_int8(cpu.level, x, error, scales, codes),
        }
    });
}

/// `out =` the dequantized numbers.
pub fn dequantize(cpu: &Cpu, code: Code, packed: &[u8], out: &mut [f32]) {
    dequantize_to(cpu, code, packed, out, false);
}

/// `out +=` the dequantized numbers.
pub fn dequantize_add(cpu: &Cpu, code: Code, packed: &[u8], out: &mut [f32]) {
    dequantize_to(cpu, code, packed, out, true);
}

fn dequantize_to(cpu: &Cpu, code: Code, packed: &[u8], out: &mut [f32], add: bool) {
    let n = out.len();
    let (scales, codes) = packed.split_at(code.start(n, packed.len()));
    parallel_for(&cpu.team, n, GRAIN_SIZE, by_rows(out, 1), |range, out| {
        let width = code.code_bytes();
        let codes = &codes[range.start * width..range.end * width];
        let per = code.per_scale();
        let scales = &scales
            [range.start / per * code.scale_bytes()..range.end.div_ceil(per) * code.scale_bytes()];
        match code {
            Code::Bf16 => dequantize_bf16(cpu.level, codes, out, add),
            Code::F16 => dequantize_f16(cpu.level, scales, codes, out, add),
            Code::Int8 => dequantize_int8(cpu.level, scales, codes, out, add),
        }
    });
}

multiversion! {
    fn quantize_bf16<I>(x: &[f32], error: &mut [f32], codes: &mut [u8]) {
        let n = error.len();
        let (x, codes) = (&x[..n], &mut codes.as_chunks_mut::<2>().0[..n]);
        for i in 0..n {
            let sum = x[i] + error[i];
            let code = <bf16 as Float>::round_from(sum);
            codes[i] = code.to_bits().to_le_bytes();
            error[i] = rounding_error(sum, code.as_f32());
        }
    }

    fn quantize_f16<I>(x: &[f32], error: &mut [f32], scales: &mut [u8], codes: &mut [u8]) {
        let chunks = x.chunks(CHUNK).zip(error.chunks_mut(CHUNK)).zip(codes.chunks_mut(2 * CHUNK));
        for (((x, sum), codes), scale_out) in chunks.zip(scales.as_chunks_mut::<4>().0) {
            let (scale, inverse) = power_of_two(add_and_max(x, sum));
            *scale_out = scale.to_le_bytes();
            let n = sum.len();
            let codes = &mut codes.as_chunks_mut::<2>().0[..n];
            for i in 0..n {
                let code = to_f16(sum[i] * inverse);
                codes[i] = code.to_le_bytes();
                sum[i] = rounding_error(sum[i], from_f16(code) * scale);
            }
        }
    }

    fn quantize_int8<I>(x: &[f32], error: &mut [f32], scales: &mut [u8], codes: &mut [u8]) {
        let chunks = x.chunks(CHUNK).zip(error.chunks_mut(CHUNK)).zip(codes.chunks_mut(CHUNK));
        for (((x, sum), codes), scale_out) in chunks.zip(scales.as_chunks_mut::<4>().0) {
            let (scale, inverse) = to_127(add_and_max(x, sum));
            *scale_out = scale.to_le_bytes();
            let n = sum.len();
            let codes = &mut codes[..n];
            for i in 0..n {
                // With this added, the last place of an f32 is one: the addition rounds, ties to even, and the lowest byte
                // is the code.
                const ONES: f32 = 12_582_912.0; // 3 · 2²²
                let shifted = sum[i] * inverse + ONES;
                codes[i] = shifted.to_bits() as u8;
                sum[i] = rounding_error(sum[i], (shifted - ONES) * scale);
            }
        }
    }

    fn dequantize_bf16<I>(codes: &[u8], out: &mut [f32], add: bool) {
        let n = out.len();
        let codes = &codes.as_chunks::<2>().0[..n];
        if add {
            for i in 0..n {
                out[i] += bf16::from_bits(u16::from_le_bytes(codes[i])).as_f32();
            }
        } else {
            for i in 0..n {
                out[i] = bf16::from_bits(u16::from_le_bytes(codes[i])).as_f32();
            }
        }
    }

    fn dequantize_f16<I>(scales: &[u8], codes: &[u8], out: &mut [f32], add: bool) {
        let chunks = codes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK));
        for ((codes, out), scale) in chunks.zip(scales.as_chunks::<4>().0) {
            let (scale, n) = (f32::from_le_bytes(*scale), out.len());
            let codes = &codes.as_chunks::<2>().0[..n];
            if add {
                for i in 0..n {
                    out[i] += from_f16(u16::from_le_bytes(codes[i])) * scale;
                }
            } else {
                for i in 0..n {
                    out[i] = from_f16(u16::from_le_bytes(codes[i])) * scale;
                }
            }
        }
    }

    fn dequantize_int8<I>(scales: &[u8], codes: &[u8], out: &mut [f32], add: bool) {
        let chunks = codes.chunks(CHUNK).zip(out.chunks_mut(CHUNK));
        for ((codes, out), scale) in chunks.zip(scales.as_chunks::<4>().0) {
            let (scale, n) = (f32::from_le_bytes(*scale), out.len());
            let codes = &codes[..n];
            if add {
                for i in 0..n {
                    out[i] += codes[i] as i8 as f32 * scale;
                }
            } else {
                for i in 0..n {
                    out[i] = codes[i] as i8 as f32 * scale;
                }
            }
        }
    }
}

/// Rounding error; zero if it is not finite, because NaN would persist in the residual.
#[inline(always)]
fn rounding_error(sum: f32, sent: f32) -> f32 {
    let error = sum - sent;
    if error.is_finite() { error } else { 0.0 }
}

/// `sum += x`; returns the largest magnitude. Magnitudes compare like integers, with NaN above infinity.
#[inline(always)]
fn add_and_max(x: &[f32], sum: &mut [f32]) -> f32 {
    let n = sum.len();
    let x = &x[..n];
    let mut max = 0;
    for i in 0..n {
        sum[i] += x[i];
        max = max.max(sum[i].to_bits() & 0x7fff_ffff);
    }
    f32::from_bits(max)
}

/// A scale and its inverse, such that `max` becomes 127.
#[inline(always)]
fn to_127(max: f32) -> (f32, f32) {
    let inverse = 127.0 / max;
    match (max.is_finite(), inverse.is_finite()) {
        (false, _) => (f32::NAN, 0.0),
        // All (nearly) zero: everything stays in the residual.
        (true, false) => (0.0, 0.0),
        (true, true) => (max / 127.0, inverse),
    }
}

/// A power of two and its inverse, such that `max` is scaled to between 2¹⁴ and 2¹⁵: below the maximum of f16, with 38
/// octaves below.
#[inline(always)]
fn power_of_two(max: f32) -> (f32, f32) {
    let exponent = max.to_bits() >> 23;
    let scale = exponent.saturating_sub(14).max(1);
    let inverse = f32::from_bits((254 - scale) << 23);
    (if max.is_finite() { f32::from_bits(scale << 23) } else { f32::NAN }, inverse)
}

/// Rounds a number below 65504 to f16, ties to even, without branches.
#[inline(always)]
fn to_f16(x: f32) -> u16 {
    let sign = x.to_bits() >> 16 & 0x8000;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    // Exponents of f16 start at 2^-14, those of f32 at 2^-126.
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_add(0xfff + odd).wrapping_sub(112 << 23) >> 13;
    // Subnormal f16 are multiples of 2^-24, the last place of an f32 near 0.5.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    (sign | if magnitude < 113 << 23 { subnormal } else { normal }) as u16
}

/// A finite f16, exactly.
#[inline(always)]
fn from_f16(code: u16) -> f32 {
    let (sign, magnitude) = ((code as u32 & 0x8000) << 16, code as u32 & 0x7fff);
    let normal = (magnitude << 13) + (112 << 23);
    // Multiples of 2^-24, converted from an integer: arithmetic on subnormal f32 is a hundred times slower.
    let subnormal = (magnitude as i32 as f32 * 0.5f32.powi(24)).to_bits();
    f32::from_bits(sign | if magnitude < 1 << 10 { subnormal } else { normal })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn f16_conversions_match_the_half_crate() {
        for code in (0..=u16::MAX).filter(|code| f16::from_bits(*code).is_finite()) {
            let (ours, theirs) = (from_f16(code), f16::from_bits(code).to_f32());
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{code:#x}");
            assert_eq!(to_f16(ours), code);
        }
        let mut bits = 0u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Exponents from far below the range of f16 to its end.
            let x = f32::from_bits(bits & 0x807f_ffff | (97 + (bits >> 23) % 45) << 23);
            if x.abs() < 65504.0 {
                assert_eq!(to_f16(x), f16::from_f32(x).to_bits(), "{x}");
            }
        }
    }
}
