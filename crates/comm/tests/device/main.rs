//! Collectives on device memory, compared with those of the host. Runs on a GPU if `LOCKSTEP_DEVICE` is `cuda`; otherwise
//! the tests print that they are skipped.

mod check;
mod collectives;
mod failures;
mod killed;
mod memory;
mod messages;
#[path = "../suite/processes.rs"]
#[allow(dead_code)]
mod processes;
#[path = "../suite/ranks.rs"]
#[allow(dead_code)]
mod ranks;

use lockstep_cuda::Gpu;

/// The first GPU, if the tests are to use it.
fn gpu(test: &str) -> Option<Gpu> {
    match std::env::var("LOCKSTEP_DEVICE").as_deref() {
        Ok("cuda") => {
            Some(Gpu::open(0).unwrap_or_else(|error| panic!("LOCKSTEP_DEVICE=cuda: {error}")))
        }
        _ => {
            println!("{test}: skipped: set LOCKSTEP_DEVICE=cuda to run it on a GPU");
            None
        }
    }
}
