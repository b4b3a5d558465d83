//! Packing into an f32 panel with AVX-512: sixteen lanes at a time, copied or transposed in registers.

use super::blocks::Strip;
use super::transpose::transpose;
use super::{Data, pairs};
use half::bf16;
use std::arch::x86_64::*;

/// How sixteen elements are read: lanes from `count` on are zero and their memory is not touched.
trait Sixteen: Copy {
    type Stored;
    /// # Safety
    /// The processor has AVX-512, and `count` elements can be read.
    unsafe fn load(from: *const Self::Stored, count: usize) -> __m512;
}

#[derive(Clone, Copy)]
struct Exact;
#[derive(Clone, Copy)]
struct Rounded;
#[derive(Clone, Copy)]
struct Widened;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    if count >= 16 { !0 } else { (1 << count) - 1 }
}

impl Sixteen for Exact {
    type Stored = f32;
    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller's promise, passed on.
        unsafe { _mm512_maskz_loadu_ps(mask(count), from) }
    }
}

impl Sixteen for Rounded {
    type Stored = f32;
    #[inline(always)]
    unsafe fn load(from: *const f32, count: usize) -> __m512 {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let bits = pairs::rounded(_mm512_maskz_loadu_ps(mask(count), from));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

impl Sixteen for Widened {
    type Stored = bf16;
    #[inline(always)]
    unsafe fn load(from: *const bf16, count: usize) -> __m512 {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(count), from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

/// # Safety
/// As `pack::plain`, on a processor with AVX-512; up to sixteen elements after the panel may be overwritten.
pub unsafe fn pack(strip: &Strip<'_>, panel: *mut f32) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match strip.from.data {
            Data::F32(values) if strip.from.rounded => {
                by_sixteen::<Rounded>(strip, values.as_ptr(), panel)
            }
            Data::F32(values) => by_sixteen::<Exact>(strip, values.as_ptr(), panel),
            Data::Bf16(values) => by_sixteen::<Widened>(strip, values.as_ptr(), panel),
        }
    }
}

/// # Safety
/// As `pack`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn by_sixteen<S: Sixteen>(strip: &Strip<'_>, from: *const S::Stored, panel: *mut f32) {
    let length = strip.ks.len();
    let mut first = 0;
    while first < strip.width {
        let count = strip.lanes.saturating_sub(first).min(16);
        // With no lane left there is nothing to point at, and nothing is read.
        let lane = if count > 0 { strip.lane + first } else { strip.lane };
        // SAFETY: the operand holds the lanes up to `count` and all of `ks`. Each line of sixteen is
        // written before the next one, so that what it writes too much is overwritten by those after.
        unsafe {
            let from = from.add(strip.from.index(lane, strip.ks.start));
            let to = panel.add(first);
            match strip.from.k_runs {
                true => across::<S>(from, strip.from.stride, count, length, to, strip.width),
                false => along::<S>(from, strip.from.stride, count, length, to, strip.width),
            }
        }
        first += 16;
    }
}

/// Lanes lie side by side: copy.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn along<S: Sixteen>(
    from: *const S::Stored,
    stride: usize,
    count: usize,
    length: usize,
    to: *mut f32,
    width: usize,
) {
    for k in 0..length {
        // SAFETY: the caller's promise, passed on.
        unsafe { _mm512_storeu_ps(to.add(k * width), S::load(from.add(k * stride), count)) };
    }
}

/// Each lane lies along k: sixteen of them are transposed in registers, sixteen k at a time.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn across<S: Sixteen>(
    from: *const S::Stored,
    stride: usize,
    count: usize,
    length: usize,
    to: *mut f32,
    width: usize,
) {
    let mut k = 0;
    while k < length {
        let run = (length - k).min(16);
        // SAFETY: the caller's promise, passed on; lanes that are not there are not read.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (lane, row) in rows.iter_mut().enumerate() {
                if lane < count {
                    *row = _mm512_castps_si512(S::load(from.add(lane * stride + k), run));
                }
            }
            let columns = transpose(rows);
            for (i, column) in columns.iter().enumerate() {
                if i < run {
                    _mm512_storeu_ps(to.add((k + i) * width), _mm512_castsi512_ps(*column));
                }
            }
        }
        k += 16;
    }
}
