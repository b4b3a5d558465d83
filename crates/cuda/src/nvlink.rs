//! NVLink connections of the GPUs, from NVML. Optional: without NVML none are known.

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::driver::Handle;
use crate::function_table;
use crate::loader::Library;
use crate::nvml::NVML;

function_table! {
    /// Functions of `libnvidia-ml.so.1`.
    Functions {
        fn nvmlInit_v2() -> c_int;
        fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> c_int;
        fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_int;
        fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> c_int;
        fn nvmlDeviceGetPciInfo_v3(device: Handle, info: *mut PciInfo) -> c_int;
        fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, active: *mut c_uint) -> c_int;
        fn nvmlDeviceGetNvLinkVersion(device: Handle, link: c_uint, version: *mut c_uint) -> c_int;
        fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, info: *mut PciInfo) -> c_int;
    }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// `NVML_NVLINK_MAX_LINKS`
const MAX_LINKS: c_uint = 18;

/// An active NVLink of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct NvLink {
    /// PCI addresses, `0000:1b:00.0`. The other end is a GPU or a switch.
    pub gpu: String,
    pub remote: String,
    /// GB/s in each direction.
    pub gbs: f64,
}

/// Active NVLinks of all GPUs. Empty without NVML or NVLink.
pub fn nvlinks() -> Vec<NvLink> {
    let Some(api) = open() else { return Vec::new() };
    let mut count = 0;
    // SAFETY: a valid pointer.
    if unsafe { (api.nvmlDeviceGetCount_v2)(&mut count) } != 0 {
        return Vec::new();
    }
    (0..count).flat_map(|index| links_of(&api, index).unwrap_or_default()).collect()
}

/// Version of the NVIDIA driver, e.g. 570.86.15.
pub fn driver_version() -> Option<String> {
    let api = open()?;
    let mut version = [0; 96];
    // SAFETY: the buffer has the given length; NVML ends the text with a zero.
    unsafe {
        let status = (api.nvmlSystemGetDriverVersion)(version.as_mut_ptr(), 95);
        (status == 0).then(|| CStr::from_ptr(version.as_ptr()).to_string_lossy().into_owned())
    }
}

fn open() -> Option<Functions> {
    let api = Functions::load(&Library::open(&NVML).ok()?).ok()?;
    // SAFETY: a plain call.
    (unsafe { (api.nvmlInit_v2)() } == 0).then_some(api)
}

fn links_of(api: &Functions, index: c_uint) -> Option<Vec<NvLink>> {
    let mut device = std::ptr::null_mut();
    // SAFETY: a valid pointer, here and below.
    let status = unsafe { (api.nvmlDeviceGetHandleByIndex_v2)(index, &mut device) };
    if status != 0 {
        return None;
    }
    let address = |call: &dyn Fn(*mut PciInfo) -> c_int| {
        // SAFETY: plain data, for which zeros are valid.
        let mut info: PciInfo = unsafe { std::mem::zeroed() };
        let PciInfo { domain, bus, device, .. } = (call(&mut info) == 0).then_some(info)?;
        Some(pci_address(domain, bus, device))
    };
    // SAFETY: a valid handle and pointer.
    let gpu = address(&|info| unsafe { (api.nvmlDeviceGetPciInfo_v3)(device, info) })?;
    let mut links = Vec::new();
    for link in 0..MAX_LINKS {
        let (mut active, mut version) = (0, 0);
        // SAFETY: valid pointers.
        let known = unsafe {
            (api.nvmlDeviceGetNvLinkState)(device, link, &mut active) == 0
                && (api.nvmlDeviceGetNvLinkVersion)(device, link, &mut version) == 0
        };
        // SAFETY: as above.
        let remote = address(&|info| unsafe {
            (api.nvmlDeviceGetNvLinkRemotePciInfo_v2)(device, link, info)
        });
        if let Some(remote) = remote.filter(|_| known && active == 1) {
            links.push(NvLink { gpu: gpu.clone(), remote, gbs: gbs_of_version(version) });
        }
    }
    Some(links)
}

/// The address as sysfs writes it.
fn pci_address(domain: u32, bus: u32, device: u32) -> String {
    format!("{domain:04x}:{bus:02x}:{device:02x}.0")
}

/// GB/s of one link in each direction, by generation of NVLink.
fn gbs_of_version(version: u32) -> f64 {
    match version {
        0 | 1 => 20.0,
        // 2 to 4: V100, A100, H100.
        2..=4 => 25.0,
        _ => 50.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_match_sysfs() {
        assert_eq!(pci_address(0, 0x1b, 0), "0000:1b:00.0");
        assert_eq!(pci_address(0x10001, 0xff, 0x1f), "10001:ff:1f.0");
    }

    #[test]
    fn without_nvml_there_are_no_links() {
        // On a machine with GPUs every link has two different ends.
        assert!(nvlinks().iter().all(|link| link.gpu != link.remote && link.gbs > 0.0));
    }
}
