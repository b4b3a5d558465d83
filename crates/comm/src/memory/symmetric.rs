//! Symmetric buffers: memory of each member of a group that all members of the host have mapped, so that
//! a collective accesses its peers' data in place. A slice of one is passed to a collective like any
//! other slice; the group recognizes it by its address.

use crate::memory::segment::Segment;
use lockstep_types::Element;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

/// One member's part of a symmetric allocation, used like a slice. Created by `Group::symmetric`.
#[derive(Debug)]
pub struct Symmetric<T: Element> {
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) len: usize,
    pub(crate) element: PhantomData<T>,
}

/// The memory of one symmetric allocation: a part per local member, each `stride` bytes long.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub id: u32,
    pub segment: Segment,
    pub stride: usize,
    pub me: usize,
}

impl Allocation {
    fn own(&self) -> *mut u8 {
        self.segment.at(self.me * self.stride)
    }
}

impl<T: Element> Deref for Symmetric<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: our own part, page-aligned, `len` elements long and valid for any bits. Peers access it
        // only in a collective that we take part in, which borrows it.
        unsafe { std::slice::from_raw_parts(self.allocation.own().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Symmetric<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and we are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.allocation.own().cast(), self.len) }
    }
}

impl<T: Element> AsMut<[T]> for Symmetric<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> AsRef<[T]> for Symmetric<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> Drop for Symmetric<T> {
    fn drop(&mut self) {
        self.registry.remove(self.allocation.id);
    }
}

/// The symmetric allocations of a group, by address.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    allocations: Mutex<Vec<Arc<Allocation>>>,
}

impl Registry {
    fn all(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Allocation>>> {
        self.allocations.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn add(&self, allocation: Arc<Allocation>) {
        self.all().push(allocation);
    }

    fn remove(&self, id: u32) {
        self.all().retain(|a| a.id != id);
    }

    /// The allocation that contains these bytes, and their offset in its segment.
    pub(crate) fn find(&self, data: *const u8, len: usize) -> Option<(u32, u64)> {
        self.all().iter().find_map(|a| {
            let offset = (data as usize).checked_sub(a.own() as usize)?;
            let inside = !data.is_null() && offset + len <= a.stride;
            inside.then(|| (a.id, (a.me * a.stride + offset) as u64))
        })
    }

    /// Addresses in our mapping of an allocation, for offsets that members announced.
    pub(crate) fn resolve(
        &self,
        id: u32,
        offsets: impl Iterator<Item = u64>,
    ) -> Option<Vec<*mut u8>> {
        let all = self.all();
        let allocation = all.iter().find(|a| a.id == id)?;
        Some(offsets.map(|at| allocation.segment.at(at as usize)).collect())
    }
}
