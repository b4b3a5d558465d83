//! Parallel loops on the threads of a rank. Results do not depend on which thread computes them.

use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_kernels::Team;

/// Calls `task` for each index below `count`; threads take the next index when they are free.
pub fn for_each(team: &Team, count: usize, task: &(dyn Fn(usize) + Sync)) {
    if team.size() == 1 || count <= 1 {
        return (0..count).for_each(task);
    }
    let next = AtomicUsize::new(0);
    team.run(&|_, _| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            task(index);
        }
    });
}

/// The results of `task` for each index below `count`, in order.
pub fn map<T: Send + Sync>(
    team: &Team,
    count: usize,
    task: &(dyn Fn(usize) -> T + Sync),
) -> Vec<T> {
    let slots: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    for_each(team, count, &|index| {
        // Every index is taken once, so the slot is empty.
        let _ = slots[index].set(task(index));
    });
    slots.into_iter().map(|slot| slot.into_inner().expect("every task has run")).collect()
}

/// A slice of which threads write disjoint elements.
pub struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: callers of `write` and `range` guarantee that no element is accessed by two threads.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Disjoint<'a, T> {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// One element.
    ///
    /// # Safety
    /// No other thread accesses this element as long as the reference lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn element(&self, index: usize) -> &mut T {
        assert!(index < self.len, "element {index} of {}", self.len);
        // SAFETY: in bounds; the caller guarantees exclusive access.
        unsafe { &mut *self.start.add(index) }
    }

    /// A range of elements.
    ///
    /// # Safety
    /// No other thread accesses these elements as long as the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: in bounds; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Splits `len` elements into pieces of about `grain` elements, at most `most` of them.
pub fn pieces(len: usize, grain: usize, most: usize) -> Vec<std::ops::Range<usize>> {
    let count = len.div_ceil(grain.max(1)).clamp(1, most.max(1));
    (0..count).map(|piece| len * piece / count..len * (piece + 1) / count).collect()
}
