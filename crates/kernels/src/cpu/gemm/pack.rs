//! Packing lanes of an operand into an f32 panel: what the inner loops read from end to end.

use super::blocks::Strip;
use super::{Data, Operand};
use crate::Float;
use half::bf16;

/// # Safety
/// The strip lies in its operand, and `panel` has room for it.
pub unsafe fn plain(strip: &Strip<'_>, panel: *mut f32) {
    let round = |value: f32| bf16::narrow(value).wide();
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match strip.from.data {
            Data::F32(values) if strip.from.rounded => {
                elements(strip, values.as_ptr(), round, panel)
            }
            Data::F32(values) => elements(strip, values.as_ptr(), |value| value, panel),
            Data::Bf16(values) => elements(strip, values.as_ptr(), bf16::wide, panel),
        }
    }
}

/// # Safety
/// As `plain`, on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
pub unsafe fn avx2(strip: &Strip<'_>, panel: *mut f32) {
    #[target_feature(enable = "avx2,fma")]
    unsafe fn inner(strip: &Strip<'_>, panel: *mut f32) {
        // SAFETY: the caller's promise, passed on.
        unsafe { plain(strip, panel) }
    }
    // SAFETY: the caller's promise, passed on.
    unsafe { inner(strip, panel) }
}

/// # Safety
/// As `plain`.
#[inline(always)]
unsafe fn elements<T: Copy>(
    strip: &Strip<'_>,
    from: *const T,
    wide: impl Fn(T) -> f32,
    panel: *mut f32,
) {
    let &Strip { from: Operand { stride, k_runs, .. }, lane, lanes, width, .. } = strip;
    let (lane_step, k_step) = if k_runs { (stride, 1) } else { (1, stride) };
    // SAFETY: indices stay within the strip, and the strip within its operand.
    unsafe {
        let from = from.add(lane * lane_step + strip.ks.start * k_step);
        for k in 0..strip.ks.len() {
            for lane in 0..lanes {
                *panel.add(k * width + lane) = wide(*from.add(lane * lane_step + k * k_step));
            }
            for lane in lanes..width {
                *panel.add(k * width + lane) = 0.0;
            }
        }
    }
}
