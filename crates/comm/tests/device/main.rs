//! Collectives on device memory, compared with those of the host. Runs on a GPU if `LOCKSTEP_DEVICE` is `cuda`; otherwise
//! the tests print that they are skipped.

mod check;
mod collectives;
mod deadline;
mod failures;
mod killed;
mod memory;
mod messages;
mod nccl;
#[path = "../suite/processes.rs"]
#[allow(dead_code)]
mod processes;
#[path = "../suite/ranks.rs"]
#[allow(dead_code)]
mod ranks;
mod registered;

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard};

use lockstep_comm::{DeviceEngine, DeviceGroup, DeviceOptions, Group};
use lockstep_cuda::Gpu;

/// Runs before `main`: the tests have many threads, and up to 32 streams of NCCL that wait for each other.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        // SAFETY: no other thread runs before `main`.
        unsafe { lockstep_cuda::use_all_queues() };
    }
    before_main
};

/// The first GPU, of one test at a time. Kernels of NCCL wait for each other on the GPU, and what another test allocates or
/// frees can make them wait forever.
struct Turn {
    gpu: Gpu,
    _others_wait: MutexGuard<'static, ()>,
}

impl Deref for Turn {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// The GPU, if the tests are to use it.
fn gpu(test: &str) -> Option<Turn> {
    static TURNS: Mutex<()> = Mutex::new(());
    match std::env::var("LOCKSTEP_DEVICE").as_deref() {
        Ok("cuda") => {
            let others_wait = TURNS.lock().unwrap_or_else(|failed| failed.into_inner());
            let gpu = Gpu::open(0).unwrap_or_else(|error| panic!("LOCKSTEP_DEVICE=cuda: {error}"));
            Some(Turn { gpu, _others_wait: others_wait })
        }
        _ => {
            println!("{test}: skipped: set LOCKSTEP_DEVICE=cuda to run it on a GPU");
            None
        }
    }
}

/// The group on NCCL, if it can be used here: several ranks on one GPU need NCCL 2.30 or newer and
/// `NCCL_MULTI_RANK_GPU_ENABLE=1`. All members call it.
fn open_nccl(group: &Group, gpu: &Gpu) -> Option<DeviceGroup> {
    open_nccl_with(group, gpu, DeviceEngine::Nccl.into())
}

fn open_nccl_with(group: &Group, gpu: &Gpu, options: DeviceOptions) -> Option<DeviceGroup> {
    match group.open_device(Some(gpu), options) {
        Ok(_) => group.device(),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}
