//! A descriptor of the backend API: attributes are set, then it is finalized.

use std::ffi::c_void;

use lockstep_cuda::Result;

use super::names::{Attribute, Kind, RawDescriptor, Value};
use super::{Functions, check};

/// A descriptor that is destroyed when dropped.
pub(crate) struct Descriptor {
    api: Functions,
    kind: Kind,
    raw: *mut c_void,
}

// SAFETY: a descriptor is plain memory of cuDNN, without a tie to a thread.
unsafe impl Send for Descriptor {}
// SAFETY: a shared descriptor is only read.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub fn new(api: Functions, kind: Kind) -> Result<Descriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        let status = unsafe { (api.cudnnBackendCreateDescriptor)(kind.number, &mut raw) };
        check(&api, status, &format!("create a descriptor of the kind {}", kind.name))?;
        Ok(Descriptor { api, kind, raw })
    }

    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    pub fn set<T: Value>(&self, attribute: Attribute, values: &[T]) -> Result<()> {
        let count = values.len() as i64;
        // SAFETY: the pointer and the count are those of the slice, and the type is that of its elements.
        let status = unsafe {
            let values = values.as_ptr().cast();
            (self.api.cudnnBackendSetAttribute)(self.raw, attribute.0, T::TYPE, count, values)
        };
        check(&self.api, status, &format!("set {attribute:?} of {}", self.kind.name))
    }

    /// Sets an attribute to another descriptor, which must live as long as this one.
    pub fn link(&self, attribute: Attribute, other: &Descriptor) -> Result<()> {
        self.set(attribute, &[RawDescriptor(other.raw)])
    }

    #[cfg(test)]
    pub fn set_text(&self, attribute: Attribute, text: &str) -> Result<()> {
        let bytes: Vec<_> = text.bytes().map(super::names::Character).collect();
        self.set(attribute, &bytes)
    }

    /// Reads at most `values.len()` elements and returns how many the attribute has.
    pub fn get<T: Value>(&self, attribute: Attribute, values: &mut [T]) -> Result<usize> {
        let (mut count, capacity) = (0, values.len() as i64);
        // cuDNN counts all elements only if there is no place for them.
        let to = if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr() };
        // SAFETY: cuDNN writes at most `capacity` elements of this type.
        let status = unsafe {
            let values = to.cast();
            let get = self.api.cudnnBackendGetAttribute;
            get(self.raw, attribute.0, T::TYPE, capacity, &mut count, values)
        };
        check(&self.api, status, &format!("read {attribute:?} of {}", self.kind.name))?;
        Ok(count as usize)
    }

    pub fn finalize(&self) -> Result<()> {
        // SAFETY: a live descriptor.
        let status = unsafe { (self.api.cudnnBackendFinalize)(self.raw) };
        check(&self.api, status, &format!("finalize the {}", self.kind.name))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and no other descriptor that is still used refers to it.
        unsafe { (self.api.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}
