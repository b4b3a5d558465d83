//! Packing a strip into f32 panels, `panel[k][lane]`: what the inner loops read from end to end.

use super::Data;
use super::kernel::Strip;
use crate::Float;
use half::bf16;

/// # Safety
/// The strip lies in its operand, and there is room for its panels.
pub unsafe fn plain(strip: &Strip<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise, passed on.
    unsafe { by_type(strip, panels.cast()) }
}

/// # Safety
/// As `plain`, on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
pub unsafe fn avx2(strip: &Strip<'_>, panels: *mut u8) {
    #[target_feature(enable = "avx2,fma")]
    unsafe fn inner(strip: &Strip<'_>, panels: *mut f32) {
        // SAFETY: the caller's promise, passed on.
        unsafe { by_type(strip, panels) }
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { inner(strip, panels.cast()) }
}

/// # Safety
/// As `plain`.
#[inline(always)]
unsafe fn by_type(strip: &Strip<'_>, panels: *mut f32) {
    let round = |value: f32| bf16::round_from(value).as_f32();
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match strip.from.data {
            Data::F32(values) if strip.from.rounded => {
                elements(strip, values.as_ptr(), round, panels)
            }
            Data::F32(values) => elements(strip, values.as_ptr(), |value| value, panels),
            Data::Bf16(values) => elements(strip, values.as_ptr(), bf16::as_f32, panels),
        }
    }
}

/// # Safety
/// As `plain`.
#[inline(always)]
unsafe fn elements<T: Copy>(
    strip: &Strip<'_>,
    from: *const T,
    wide: impl Fn(T) -> f32,
    panels: *mut f32,
) {
    let (width, ks) = (strip.width, strip.ks.clone());
    for (at, lane) in strip.lanes.clone().step_by(width).enumerate() {
        let lanes = (strip.lanes.end - lane).min(width);
        for k in 0..ks.len() {
            // SAFETY: indices stay within the strip, and the strip within its operand.
            unsafe {
                let line = panels.add(at * strip.apart + k * width);
                for i in 0..lanes {
                    *line.add(i) = wide(*from.add(strip.from.index(lane + i, ks.start + k)));
                }
                (lanes..width).for_each(|i| *line.add(i) = 0.0);
            }
        }
    }
}
