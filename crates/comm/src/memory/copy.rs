//! Non-temporal copies, which bypass the caches: for data too large to be still cached when it is used
//! again. Saves reading the destination before it is overwritten.

/// Transfers from this size on use non-temporal stores.
pub(crate) const LARGE: usize = 12 << 20;

/// Copies `len` bytes that are part of a transfer of `total` bytes.
///
/// # Safety
/// As for `std::ptr::copy_nonoverlapping`.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, total: usize) {
    #[cfg(target_arch = "x86_64")]
    if total >= LARGE && std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is available; the rest is guaranteed by the caller.
        return unsafe { stream(from, to, len) };
    }
    let _ = total;
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// `to = from`, as part of a transfer of `total` bytes.
pub(crate) fn copy_slice(from: &[u8], to: &mut [u8], total: usize) {
    assert_eq!(from.len(), to.len(), "the lengths must be equal");
    // SAFETY: two live slices of this length.
    unsafe { copy(from.as_ptr(), to.as_mut_ptr(), to.len(), total) };
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm512_loadu_si512, _mm512_stream_si512};
    // Streaming stores need whole cache lines of the destination.
    let head = to.align_offset(64).min(len);
    let lines = (len - head) / 64;
    // SAFETY: head, lines and tail together are the `len` bytes of the caller. The stores are aligned by
    // `head`, and fenced so that they are visible before later synchronization.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for i in 0..lines {
            let line = _mm512_loadu_si512(from.add(head + 64 * i).cast());
            _mm512_stream_si512(to.add(head + 64 * i).cast(), line);
        }
        let done = head + 64 * lines;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_alignments_and_lengths_are_copied() {
        let source: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        for start in [0, 1, 13, 63, 64] {
            for len in [0, 1, 63, 64, 65, 200, 900] {
                let mut to = vec![255u8; 1100];
                // SAFETY: both ranges are inside their buffers.
                unsafe { copy(source[start..].as_ptr(), to[start..].as_mut_ptr(), len, LARGE) };
                assert_eq!(to[start..start + len], source[start..start + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|b| *b == 255));
            }
        }
    }
}
