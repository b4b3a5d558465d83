//! Packing into f32 panels, `panel[k][outer]`, which the micro-kernels read sequentially.

use super::Data;
use super::panel::PackJob;
use crate::Float;
use half::bf16;

/// # Safety
/// The job's range is within its operand, and `panels` can hold it.
pub unsafe fn portable(job: &PackJob<'_>, panels: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { by_type(job, panels.cast()) }
}

/// # Safety
/// As `portable`, on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
pub unsafe fn avx2(job: &PackJob<'_>, panels: *mut u8) {
    #[target_feature(enable = "avx2,fma")]
    unsafe fn inner(job: &PackJob<'_>, panels: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { by_type(job, panels) }
    }
    // SAFETY: the caller's promise.
    unsafe { inner(job, panels.cast()) }
}

/// # Safety
/// As `portable`.
#[inline(always)]
unsafe fn by_type(job: &PackJob<'_>, panels: *mut f32) {
    let rounded = |value: f32| bf16::round_from(value).as_f32();
    // SAFETY: the caller's promise.
    unsafe {
        match job.from.data {
            Data::F32(values) if job.from.round_to_bf16 => {
                elements(job, values.as_ptr(), rounded, panels)
            }
            Data::F32(values) => elements(job, values.as_ptr(), |value| value, panels),
            Data::Bf16(values) => elements(job, values.as_ptr(), bf16::as_f32, panels),
        }
    }
}

/// # Safety
/// As `portable`.
#[inline(always)]
unsafe fn elements<T: Copy>(
    job: &PackJob<'_>,
    from: *const T,
    to_f32: impl Fn(T) -> f32,
    panels: *mut f32,
) {
    let (width, ks) = (job.width, job.ks.clone());
    for (panel, first) in job.outer.clone().step_by(width).enumerate() {
        let count = (job.outer.end - first).min(width);
        for k in 0..ks.len() {
            // SAFETY: indices stay within the job's range, and that within its operand.
            unsafe {
                let line = panels.add(panel * job.panel_stride + k * width);
                for i in 0..count {
                    *line.add(i) = to_f32(*from.add(job.from.index(first + i, ks.start + k)));
                }
                (count..width).for_each(|i| *line.add(i) = 0.0);
            }
        }
    }
}
