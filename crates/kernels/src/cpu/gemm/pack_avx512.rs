//! Packing into f32 panels with AVX-512: sixteen elements at a time, copied or transposed in registers.

use super::panel::PackJob;
use super::transpose::transpose;
use super::{Data, pack_bf16};
use half::bf16;
use std::arch::x86_64::*;

/// Prefetch distance in rows of memory. The hardware prefetcher does not follow page-sized strides.
const PREFETCH_ROWS: usize = 8;

/// # Safety
/// As `pack_f32::portable`, on a processor with AVX-512.
pub unsafe fn pack(job: &PackJob<'_>, panels: *mut u8) {
    let panels = panels.cast();
    // SAFETY: the caller's promise.
    unsafe {
        match job.from.data {
            Data::F32(values) if job.from.round_to_bf16 => {
                by_layout::<RoundedF32>(job, values.as_ptr(), panels)
            }
            Data::F32(values) => by_layout::<F32>(job, values.as_ptr(), panels),
            Data::Bf16(values) => by_layout::<Bf16>(job, values.as_ptr(), panels),
        }
    }
}

/// # Safety
/// As `pack`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn by_layout<S: Load16>(job: &PackJob<'_>, from: *const S::Stored, panels: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.from.k_contiguous {
            true => transpose_rows::<S>(job, from, panels),
            false => copy_rows::<S>(job, from, panels),
        }
    }
}

/// Elements of one k are contiguous: each row of memory is copied into all panels at once.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn copy_rows<S: Load16>(job: &PackJob<'_>, from: *const S::Stored, panels: *mut f32) {
    let (width, stride) = (job.width, job.from.stride);
    let (whole, rest) = (job.outer.len() / width, job.outer.len() % width);
    let ahead = PREFETCH_ROWS * stride;
    for k in 0..job.ks.len() {
        // SAFETY: a row of memory holds the job's range; only `width` elements of a panel's line are written.
        unsafe {
            let mut row = from.add((job.ks.start + k) * stride + job.outer.start);
            let mut line = panels.add(k * width);
            if width == 32 {
                for _ in 0..whole {
                    copy_32::<S>(row, line, ahead);
                    row = row.add(32);
                    line = line.add(job.panel_stride);
                }
            } else {
                for _ in 0..whole {
                    copy::<S>((row, width), (line, width), ahead);
                    row = row.add(width);
                    line = line.add(job.panel_stride);
                }
            }
            if rest > 0 {
                copy::<S>((row, rest), (line, width), ahead);
            }
        }
    }
}

/// Like `copy`, for 32 elements and without masks.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn copy_32<S: Load16>(from: *const S::Stored, line: *mut f32, ahead: usize) {
    // SAFETY: the caller's promise; a prefetch may point anywhere.
    unsafe {
        let next = from.wrapping_add(ahead);
        _mm_prefetch::<_MM_HINT_T0>(next.cast());
        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(16).cast());
        _mm512_storeu_ps(line, S::load(from, !0));
        _mm512_storeu_ps(line.add(16), S::load(from.add(16), !0));
    }
}

/// Copies `count` elements to a line of `width`, padded with zeros, and prefetches the elements `ahead`.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn copy<S: Load16>(
    (from, count): (*const S::Stored, usize),
    (line, width): (*mut f32, usize),
    ahead: usize,
) {
    let mut first = 0;
    while first < width {
        let source = from.wrapping_add(first);
        // SAFETY: masks exclude reads past `count` and writes past `width`; a prefetch may point anywhere.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(ahead).cast());
            let read = S::load(source, mask(count.saturating_sub(first)));
            _mm512_mask_storeu_ps(line.add(first), mask(width - first), read);
        }
        first += 16;
    }
}

/// Elements along k are contiguous: squares of 16×16 are transposed in registers.
///
/// # Safety
/// As `pack`.
#[inline(always)]
unsafe fn transpose_rows<S: Load16>(job: &PackJob<'_>, from: *const S::Stored, panels: *mut f32) {
    let (width, kc, stride) = (job.width, job.ks.len(), job.from.stride);
    for (panel, outer) in job.outer.clone().step_by(width).enumerate() {
        for first in (0..width).step_by(16) {
            let count = job.outer.end.saturating_sub(outer + first).min(width - first).min(16);
            let square = Square { stride, count, width, write: mask(width - first) };
            // SAFETY: nothing outside the job's range is read, nor written outside the panel's width.
            unsafe {
                let here = from.wrapping_add((outer + first) * stride + job.ks.start);
                let to = panels.add(panel * job.panel_stride + first);
                let mut k = 0;
                while k + 16 <= kc {
                    prefetch::<S>(here.wrapping_add(width * stride + k), stride, count);
                    square.transpose::<S>(here.wrapping_add(k), 16, to.add(k * width));
                    k += 16;
                }
                if k < kc {
                    square.transpose::<S>(here.wrapping_add(k), kc - k, to.add(k * width));
                }
            }
        }
    }
}

/// Prefetches a line of each of `count` rows of the next panel, which is packed after this one has been used.
#[inline(always)]
fn prefetch<S: Load16>(from: *const S::Stored, stride: usize, count: usize) {
    for row in 0..count {
        // SAFETY: a prefetch may point anywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(row * stride).cast()) };
    }
}

/// Up to 16×16 elements to transpose into a panel.
struct Square {
    /// Elements between rows of the operand, and how many rows to read.
    stride: usize,
    count: usize,
    /// Elements between lines of the panel, and which of sixteen to write.
    width: usize,
    write: __mmask16,
}

impl Square {
    /// Transposes `ks` elements of each row.
    ///
    /// # Safety
    /// As `pack`.
    #[inline(always)]
    unsafe fn transpose<S: Load16>(&self, from: *const S::Stored, ks: usize, to: *mut f32) {
        let read = mask(ks);
        // SAFETY: the caller's promise.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                if i < self.count {
                    *row = _mm512_castps_si512(S::load(from.add(i * self.stride), read));
                }
            }
            for (i, column) in transpose(rows).into_iter().enumerate() {
                if i < ks {
                    let column = _mm512_castsi512_ps(column);
                    _mm512_mask_storeu_ps(to.add(i * self.width), self.write, column);
                }
            }
        }
    }
}

/// Loads sixteen elements as f32. Elements outside the mask are zero, and their memory is not accessed.
trait Load16: Copy {
    type Stored;
    /// # Safety
    /// The processor has AVX-512, and the elements of the mask can be read.
    unsafe fn load(from: *const Self::Stored, mask: __mmask16) -> __m512;
}

#[derive(Clone, Copy)]
struct F32;
#[derive(Clone, Copy)]
struct RoundedF32;
#[derive(Clone, Copy)]
struct Bf16;

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    if count >= 16 { !0 } else { (1 << count) - 1 }
}

impl Load16 for F32 {
    type Stored = f32;
    #[inline(always)]
    unsafe fn load(from: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

impl Load16 for RoundedF32 {
    type Stored = f32;
    #[inline(always)]
    unsafe fn load(from: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = pack_bf16::round_to_bf16(_mm512_maskz_loadu_ps(mask, from));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

impl Load16 for Bf16 {
    type Stored = bf16;
    #[inline(always)]
    unsafe fn load(from: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}
