//! A step in the steady state does not allocate memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use lockstep_comm::on_threads;
use lockstep_kernels::{Device, DeviceType};
use lockstep_trainer::Rank;

use crate::plans::{plan, source};

/// Counts the allocations of threads whose `COUNT` is set.
struct CountingAllocator;

thread_local! {
    static COUNT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn count() {
    // Fails in a thread that is ending.
    let _ = COUNT.try_with(|count| count.set(count.get().map(|n| n + 1)));
}

// SAFETY: all calls are forwarded to the system allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_step_in_the_steady_state_does_not_allocate() {
    for preset in ["gpt2-test", "llama-test", "moe-test"] {
        for more in ["precision.compute=f32", "precision.compute=bf16", "layout.recompute=full"] {
            let plan = plan(1, &[&format!("model.preset={preset}"), more]);
            let source = source();
            let counts = on_threads(1, |world| {
                let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
                let mut counts = Vec::new();
                let mut reserved = 0;
                for step in 1..=8 {
                    reserved = rank.device.memory().reserved;
                    COUNT.set(Some(0));
                    rank.step(&source, step).unwrap();
                    counts.push(COUNT.replace(None).unwrap());
                }
                assert_eq!(rank.device.memory().reserved, reserved, "{preset} {more}");
                counts
            });
            // Shapes of mixture-of-experts layers depend on the router, so buffers may grow during some steps.
            let last = *counts[0].last().unwrap();
            // A host allocates small lists while its GPU works; the memory of the GPU must not grow.
            if plan.device.kind == DeviceType::Cuda {
                continue;
            }
            assert_eq!(last, 0, "{preset} {more}: allocations per step {:?}", counts[0]);
        }
    }
}
