//! Temporary memory, aligned for any element type.

use crate::memory::channel::GRAIN;
use std::ops::{Deref, DerefMut};

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Grain(#[allow(dead_code, reason = "only its bytes are used")] [u8; GRAIN]);

#[derive(Default)]
pub(crate) struct Scratch {
    grains: Vec<Grain>,
    len: usize,
}

impl Scratch {
    /// `len` zero bytes.
    pub(crate) fn new(len: usize) -> Scratch {
        Scratch { grains: vec![Grain([0; GRAIN]); len.div_ceil(GRAIN)], len }
    }

    /// Grows to at least `len` bytes; the content is undefined.
    pub(crate) fn reserve(&mut self, len: usize) {
        if self.len < len {
            *self = Scratch::new(len);
        }
    }

    pub(crate) fn copy_of(bytes: &[u8]) -> Scratch {
        let mut scratch = Scratch::new(bytes.len());
        scratch.copy_from_slice(bytes);
        scratch
    }
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the grains hold at least `len` plain bytes.
        unsafe { std::slice::from_raw_parts(self.grains.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and we are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.grains.as_mut_ptr().cast(), self.len) }
    }
}
