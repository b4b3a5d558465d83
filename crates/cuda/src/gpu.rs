//! GPUs that this process has opened.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex};

use crate::context::{self, Context};
use crate::driver::Driver;
use crate::launch::Kernels;
use crate::{CudaError, Result, loader};

/// Whether the control daemon of MPS runs, through which processes use a GPU at the same time.
pub fn mps_runs() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|folder| !folder.is_empty());
    let folder = folder.map_or_else(|| "/tmp/nvidia-mps".into(), std::path::PathBuf::from);
    folder.join("control").exists()
}

/// An open GPU. All users in a process share its context and kernels, which live as long as the process.
#[derive(Clone)]
pub struct Gpu {
    pub context: Arc<Context>,
    pub kernels: Arc<Kernels>,
}

impl Gpu {
    /// Number of GPUs that the driver finds.
    pub fn count() -> Result<usize> {
        context::count(&Driver::load()?)
    }

    /// PCI address of GPU `index` as sysfs writes it, without opening the GPU.
    pub fn pci_address(index: usize) -> Result<String> {
        let driver = Driver::load()?;
        let (mut device, mut id) = (0, [0; 32]);
        // SAFETY: valid pointers; the buffer has this length, and the driver ends the text with a zero.
        let text = unsafe {
            let status = (driver.api.cuDeviceGet)(&mut device, index as std::ffi::c_int);
            driver.check(status, &format!("find GPU {index}"))?;
            let status = (driver.api.cuDeviceGetPCIBusId)(id.as_mut_ptr(), 31, device);
            driver.check(status, &format!("read the PCI address of GPU {index}"))?;
            std::ffi::CStr::from_ptr(id.as_ptr()).to_string_lossy().to_lowercase()
        };
        Ok(text)
    }

    /// Finds a GPU and the libraries that are always needed, without opening it.
    pub fn check() -> Result<()> {
        if Gpu::count()? == 0 {
            return Err(CudaError::new("the CUDA driver finds no GPU"));
        }
        loader::Library::open(&loader::NVRTC)?;
        loader::Library::open(&loader::CUBLASLT)?;
        Ok(())
    }

    /// Opens GPU `index`.
    pub fn open(index: usize) -> Result<Gpu> {
        static OPEN: Mutex<BTreeMap<usize, Gpu>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Ok(match open.entry(index) {
            Entry::Occupied(opened) => opened.get().clone(),
            Entry::Vacant(vacant) => {
                let context = Context::new(index)?;
                let kernels = Arc::new(Kernels::new(&context)?);
                vacant.insert(Gpu { context, kernels }).clone()
            }
        })
    }
}
