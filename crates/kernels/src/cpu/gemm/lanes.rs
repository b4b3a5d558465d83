//! Packing into f32 panels with AVX-512: sixteen lanes at a time, copied or transposed in registers.

use super::kernel::Strip;
use super::transpose::transpose;
use super::{Data, pairs};
use half::bf16;
use std::arch::x86_64::*;

/// Rows of memory that are asked for ahead: strides of pages are beyond what the hardware foresees.
const AHEAD: usize = 8;

/// # Safety
/// As `pack::plain`, on a processor with AVX-512.
pub unsafe fn pack(strip: &Strip<'_>, panels: *mut u8) {
    let panels = panels.cast();
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match strip.from.data {
            Data::F32(values) if strip.from.rounded => {
                by_sixteen::<Rounded>(strip, values.as_ptr(), panels)
            }
            Data::F32(values) => by_sixteen::<Exact>(strip, values.as_ptr(), panels),
            Data::Bf16(values) => by_sixteen::<Widened>(strip, values.as_ptr(), panels),
        }
    }
}

/// # Safety
/// As `pack`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn by_sixteen<S: Sixteen>(strip: &Strip<'_>, from: *const S::Stored, panels: *mut f32) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match strip.from.k_runs {
            true => across::<S>(strip, from, panels),
            false => along::<S>(strip, from, panels),
        }
    }
}

/// Lanes lie side by side: each row of memory is copied into all panels at once.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn along<S: Sixteen>(strip: &Strip<'_>, from: *const S::Stored, panels: *mut f32) {
    let (width, long, stride) = (strip.width, strip.ks.len(), strip.from.stride);
    for k in 0..long {
        // SAFETY: a row of memory has all lanes of the strip; of a panel's line only its width is written.
        unsafe {
            let row = from.add((strip.ks.start + k) * stride);
            let mut line = panels.add(k * width);
            for lane in strip.lanes.clone().step_by(width) {
                let mut first = 0;
                while first < width {
                    let here = lane + first;
                    let count = strip.lanes.end.saturating_sub(here).min(width - first).min(16);
                    // With no lane left there is nothing to point at, and nothing is read.
                    let source = if count > 0 { row.add(here) } else { row };
                    _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(AHEAD * stride).cast());
                    _mm512_mask_storeu_ps(
                        line.add(first),
                        mask(width - first),
                        S::load(source, count),
                    );
                    first += 16;
                }
                line = line.add(width * long);
            }
        }
    }
}

/// Each lane lies along k: sixteen of them are transposed in registers, sixteen k at a time.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn across<S: Sixteen>(strip: &Strip<'_>, from: *const S::Stored, panels: *mut f32) {
    let (width, long, stride) = (strip.width, strip.ks.len(), strip.from.stride);
    for (at, lane) in strip.lanes.clone().step_by(width).enumerate() {
        for first in (0..width).step_by(16) {
            let count = strip.lanes.end.saturating_sub(lane + first).min(width - first).min(16);
            let store = mask(width - first);
            for k in (0..long).step_by(16) {
                let run = (long - k).min(16);
                // SAFETY: lanes and k that are not there are not read, nor written past the panel's width.
                unsafe {
                    let mut rows = [_mm512_setzero_si512(); 16];
                    for (i, row) in rows.iter_mut().enumerate() {
                        if i < count {
                            let source = from.add((lane + first + i) * stride + strip.ks.start + k);
                            *row = _mm512_castps_si512(S::load(source, run));
                        }
                    }
                    let to = panels.add((at * long + k) * width + first);
                    for (i, column) in transpose(rows).into_iter().enumerate() {
                        if i < run {
                            _mm512_mask_storeu_ps(
                                to.add(i * width),
                                store,
                                _mm512_castsi512_ps(column),
                            );
                        }
                    }
                }
            }
        }
    }
}

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
