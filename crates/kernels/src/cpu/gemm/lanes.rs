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
    let (whole, rest) = (strip.lanes.len() / width, strip.lanes.len() % width);
    for k in 0..long {
        // SAFETY: a row of memory has all lanes of the strip; of a panel's line only its width is written.
        unsafe {
            let mut row = from.add((strip.ks.start + k) * stride + strip.lanes.start);
            let mut line = panels.add(k * width);
            if width == 32 {
                for _ in 0..whole {
                    two_lines::<S>(row, line, AHEAD * stride);
                    row = row.add(32);
                    line = line.add(strip.apart);
                }
            } else {
                for _ in 0..whole {
                    copy::<S>(row, width, line, width, AHEAD * stride);
                    row = row.add(width);
                    line = line.add(strip.apart);
                }
            }
            if rest > 0 {
                copy::<S>(row, rest, line, width, AHEAD * stride);
            }
        }
    }
}

/// Copies 32 elements, as `copy` does, without its masks.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn two_lines<S: Sixteen>(from: *const S::Stored, line: *mut f32, ahead: usize) {
    // SAFETY: the caller's promise, passed on; a prefetch may point anywhere.
    unsafe {
        let next = from.wrapping_add(ahead);
        _mm_prefetch::<_MM_HINT_T0>(next.cast());
        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(16).cast());
        _mm512_storeu_ps(line, S::load(from, !0));
        _mm512_storeu_ps(line.add(16), S::load(from.add(16), !0));
    }
}

/// Copies `count` elements to a line of `width`, the others zero; asks for those that lie `ahead`.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn copy<S: Sixteen>(
    from: *const S::Stored,
    count: usize,
    line: *mut f32,
    width: usize,
    ahead: usize,
) {
    let mut first = 0;
    while first < width {
        let source = from.wrapping_add(first);
        // SAFETY: what lies past `count` is masked out of the read, what lies past `width` out of the write; a
        // prefetch may point anywhere.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(ahead).cast());
            let read = S::load(source, mask(count.saturating_sub(first)));
            _mm512_mask_storeu_ps(line.add(first), mask(width - first), read);
        }
        first += 16;
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
            // SAFETY: lanes and k that are not there are not read, nor written past the panel's width.
            unsafe {
                let here = from.wrapping_add((lane + first) * stride + strip.ks.start);
                let to = panels.add(at * strip.apart + first);
                let mut k = 0;
                while k + 16 <= long {
                    ask::<S>(here.wrapping_add(width * stride + k), stride, count);
                    turn::<S>(
                        here.wrapping_add(k),
                        stride,
                        count,
                        !0,
                        to.add(k * width),
                        width,
                        store,
                        16,
                    );
                    k += 16;
                }
                if k < long {
                    let run = long - k;
                    turn::<S>(
                        here.wrapping_add(k),
                        stride,
                        count,
                        mask(run),
                        to.add(k * width),
                        width,
                        store,
                        run,
                    );
                }
            }
        }
    }
}

/// Asks for a line of each of `count` lanes: of the next panel, which is packed when this one has been used.
#[inline(always)]
fn ask<S: Sixteen>(from: *const S::Stored, stride: usize, count: usize) {
    for lane in 0..count {
        // SAFETY: a prefetch reads nothing and may point anywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(lane * stride).cast()) };
    }
}

/// `count` lanes of up to sixteen k each, read by one mask and written by another, as `run` lines of a panel.
///
/// # Safety
/// As `pack`.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // the body of a loop, with its constants in registers
unsafe fn turn<S: Sixteen>(
    from: *const S::Stored,
    stride: usize,
    count: usize,
    read: __mmask16,
    to: *mut f32,
    width: usize,
    write: __mmask16,
    run: usize,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            if i < count {
                *row = _mm512_castps_si512(S::load(from.add(i * stride), read));
            }
        }
        for (i, column) in transpose(rows).into_iter().enumerate() {
            if i < run {
                _mm512_mask_storeu_ps(to.add(i * width), write, _mm512_castsi512_ps(column));
            }
        }
    }
}

/// How sixteen elements are read: lanes outside the mask are zero and their memory is not touched.
trait Sixteen: Copy {
    type Stored;
    /// # Safety
    /// The processor has AVX-512, and the elements of the mask can be read.
    unsafe fn load(from: *const Self::Stored, mask: __mmask16) -> __m512;
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
    unsafe fn load(from: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise, passed on.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

impl Sixteen for Rounded {
    type Stored = f32;
    #[inline(always)]
    unsafe fn load(from: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let bits = pairs::rounded(_mm512_maskz_loadu_ps(mask, from));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

impl Sixteen for Widened {
    type Stored = bf16;
    #[inline(always)]
    unsafe fn load(from: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}
