//! Energy of a GPU, from NVML. Optional: without NVML there is no figure.

use std::ffi::{c_int, c_uint, c_ulonglong};

use crate::driver::Handle;
use crate::function_table;
use crate::loader::{Library, Wanted};

pub(crate) const NVML: Wanted = Wanted {
    name: "NVML",
    sonames: &["libnvidia-ml.so.1"],
    install: "install the NVIDIA driver with its management library",
};

function_table! {
    /// Functions of `libnvidia-ml.so.1`.
    Functions {
        fn nvmlInit_v2() -> c_int;
        fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const std::ffi::c_char, device: *mut Handle) -> c_int;
        fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> c_int;
        fn nvmlDeviceGetTotalEnergyConsumption(device: Handle, millijoules: *mut c_ulonglong) -> c_int;
    }
}

/// The energy counter of one GPU.
pub struct EnergyCounter {
    api: Functions,
    device: Handle,
}

// SAFETY: NVML's handles may be used from any thread.
unsafe impl Send for EnergyCounter {}
// SAFETY: as above.
unsafe impl Sync for EnergyCounter {}

impl EnergyCounter {
    /// The counter of GPU `index`, which has the PCI address `bus_id` if it is known.
    pub fn open(index: usize, bus_id: Option<&std::ffi::CStr>) -> Option<EnergyCounter> {
        let api = Functions::load(&Library::open(&NVML).ok()?).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: plain calls with valid pointers.
        let status = unsafe {
            if (api.nvmlInit_v2)() != 0 {
                return None;
            }
            match bus_id {
                Some(id) => (api.nvmlDeviceGetHandleByPciBusId_v2)(id.as_ptr(), &mut device),
                None => (api.nvmlDeviceGetHandleByIndex_v2)(index as c_uint, &mut device),
            }
        };
        (status == 0).then_some(EnergyCounter { api, device })
    }

    /// Joules since the driver was loaded.
    pub fn joules(&self) -> Option<f64> {
        let mut millijoules = 0;
        // SAFETY: a valid handle and pointer.
        let status = unsafe {
            (self.api.nvmlDeviceGetTotalEnergyConsumption)(self.device, &mut millijoules)
        };
        (status == 0).then_some(millijoules as f64 * 1e-3)
    }
}
