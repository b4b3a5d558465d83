//! A step in the steady state allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_trainer::Rank;

use crate::plans::{plan, source};

/// Counts what the calling thread allocates, while it is watched.
struct Counting;

thread_local! {
    static COUNT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn count() {
    // A thread that is ending has no counter any more.
    let _ = COUNT.try_with(|count| count.set(count.get().map(|n| n + 1)));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_steady_step_allocates_nothing() {
    for preset in ["gpt2-test", "llama-test", "moe-test"] {
        for more in ["precision.compute=f32", "precision.compute=bf16", "layout.recompute=full"] {
            let plan = plan(1, &[&format!("model.preset={preset}"), more]);
            let source = source();
            let counts = on_threads(1, |world| {
                let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
                (1..=8)
                    .map(|step| {
                        COUNT.set(Some(0));
                        rank.step(&source, step).unwrap();
                        COUNT.replace(None).unwrap()
                    })
                    .collect::<Vec<_>>()
            });
            // A mixture's shapes vary with what its router decides, so lists may grow for some steps.
            let last = *counts[0].last().unwrap();
            assert_eq!(last, 0, "{preset} {more}: allocations step by step {:?}", counts[0]);
        }
    }
}
