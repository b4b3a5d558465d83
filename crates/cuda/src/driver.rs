//! The CUDA driver API, as far as this backend uses it.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::error::{CudaError, Result};
use crate::function_table;
use crate::loader::{self, Library};

pub type Handle = *mut c_void;
/// An address in device memory.
pub type Address = u64;
type Status = c_int;

function_table! {
    /// Functions of `libcuda.so.1`.
    Functions {
        fn cuInit(flags: c_uint) -> Status;
        fn cuDriverGetVersion(version: *mut c_int) -> Status;
        fn cuDeviceGetCount(count: *mut c_int) -> Status;
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status;
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Status;
        fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) -> Status;
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> Status;
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Status;
        fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> Status;
        fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status;
        fn cuCtxSetCurrent(context: Handle) -> Status;
        fn cuCtxSynchronize() -> Status;
        fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Status;
        fn cuIpcGetEventHandle(handle: *mut IpcHandle, event: Handle) -> Status;
        fn cuIpcOpenEventHandle(event: *mut Handle, handle: IpcHandle) -> Status;
        fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: Address) -> Status;
        fn cuIpcOpenMemHandle_v2(address: *mut Address, handle: IpcHandle, flags: c_uint) -> Status;
        fn cuIpcCloseMemHandle(address: Address) -> Status;
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status;
        fn cuMemAlloc_v2(address: *mut Address, bytes: usize) -> Status;
        fn cuMemFree_v2(address: Address) -> Status;
        fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) -> Status;
        fn cuMemFreeHost(pointer: *mut c_void) -> Status;
        fn cuMemAddressReserve(address: *mut Address, bytes: usize, alignment: usize, hint: Address, flags: u64) -> Status;
        fn cuMemAddressFree(address: Address, bytes: usize) -> Status;
        fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64) -> Status;
        fn cuMemRelease(handle: u64) -> Status;
        fn cuMemMap(address: Address, bytes: usize, offset: usize, handle: u64, flags: u64) -> Status;
        fn cuMemUnmap(address: Address, bytes: usize) -> Status;
        fn cuMemSetAccess(address: Address, bytes: usize, access: *const AccessDescription, count: usize) -> Status;
        fn cuMemcpyHtoDAsync_v2(to: Address, from: *const c_void, bytes: usize, stream: Handle) -> Status;
        fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Address, bytes: usize, stream: Handle) -> Status;
        fn cuMemcpyAsync(to: Address, from: Address, bytes: usize, stream: Handle) -> Status;
        fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) -> Status;
        fn cuMemsetD8Async(address: Address, value: u8, bytes: usize, stream: Handle) -> Status;
        fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> Status;
        fn cuStreamDestroy_v2(stream: Handle) -> Status;
        fn cuStreamSynchronize(stream: Handle) -> Status;
        fn cuEventCreate(event: *mut Handle, flags: c_uint) -> Status;
        fn cuEventDestroy_v2(event: Handle) -> Status;
        fn cuEventRecord(event: Handle, stream: Handle) -> Status;
        fn cuEventSynchronize(event: Handle) -> Status;
        fn cuEventQuery(event: Handle) -> Status;
        fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) -> Status;
        fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status;
        fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> Status;
        fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Handle) -> Status;
        fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) -> Status;
        fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Status;
        fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) -> Status;
        fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status;
        fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64) -> Status;
        fn cuGraphLaunch(executable: Handle, stream: Handle) -> Status;
        fn cuGraphDestroy(graph: Handle) -> Status;
        fn cuGraphExecDestroy(executable: Handle) -> Status;
        fn cuTensorMapEncodeTiled(
            map: *mut c_void,
            dtype: c_int,
            rank: c_uint,
            address: *mut c_void,
            dims: *const u64,
            strides: *const u64,
            size: *const c_uint,
            steps: *const c_uint,
            interleave: c_int,
            swizzle: c_int,
            promotion: c_int,
            fill: c_int,
        ) -> Status;
        fn cuLaunchKernel(
            function: Handle,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared_bytes: c_uint,
            stream: Handle,
            parameters: *mut *mut c_void,
            extra: *mut *mut c_void,
        ) -> Status;
        fn cuGetErrorName(status: Status, name: *mut *const c_char) -> Status;
        fn cuGetErrorString(status: Status, text: *mut *const c_char) -> Status;
    }
}

function_table! {
    /// Functions that tell which memory an address is in.
    MemoryFunctions {
        fn cuMemGetAddressRange_v2(start: *mut Address, bytes: *mut usize, address: Address) -> Status;
        fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: Address) -> Status;
    }
}

/// `CU_POINTER_ATTRIBUTE_BUFFER_ID`
pub const BUFFER_ID: c_int = 7;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryLocation {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProperties {
    pub kind: c_int,
    /// How the memory can be shared with other processes.
    pub handle_types: c_int,
    pub location: MemoryLocation,
    pub metadata: *mut c_void,
    pub compression: u8,
    /// Network cards may read and write the memory.
    pub rdma: u8,
    pub reserved: [u8; 6],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDescription {
    pub location: MemoryLocation,
    pub flags: c_int,
}

/// `CUipcEventHandle` and `CUipcMemHandle`: names of an event or of memory in other processes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// `CU_EVENT_DISABLE_TIMING`
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_EVENT_INTERPROCESS`
pub const EVENT_INTERPROCESS: c_uint = 4;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
pub const IPC_LAZY_PEER_ACCESS: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
pub const ALLOCATION_PINNED: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub const HANDLE_POSIX_FILE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
pub const ACCESS_READ_WRITE: c_int = 3;
/// `CU_STREAM_NON_BLOCKING`
pub const NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
pub const CAPTURE_RELAXED: c_int = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`
pub const HOST_PORTABLE: c_uint = 1;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`
pub const STATIC_SHARED: c_int = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
pub const MAX_DYNAMIC_SHARED: c_int = 8;

pub const SUCCESS: Status = 0;
pub const OUT_OF_MEMORY: Status = 2;
const NO_DEVICE: Status = 100;
/// `CUDA_ERROR_NOT_READY`
pub const NOT_READY: Status = 600;

/// Attributes of a device (`CUdevice_attribute`).
#[derive(Clone, Copy)]
pub enum Attribute {
    Multiprocessors = 16,
    Major = 75,
    Minor = 76,
    SharedPerBlock = 97,
    /// Mapped memory can be shared with other processes.
    SharesMapped = 103,
    /// Network cards can read and write mapped memory.
    RdmaMapped = 110,
}

/// The driver, initialized.
#[derive(Clone)]
pub struct Driver {
    pub api: Functions,
    /// The newest CUDA version that the driver supports, e.g. 13000.
    pub version: i32,
    pub library: Library,
}

/// The oldest CUDA version of a driver that works.
const OLDEST: i32 = 12_000;

impl Driver {
    /// Loads and initializes the driver.
    pub fn load() -> Result<Driver> {
        let library = Library::open(&loader::DRIVER)?;
        let api = Functions::load(&library)?;
        let mut version = 0;
        // SAFETY: plain calls of the driver API, here and below.
        let status = unsafe { (api.cuInit)(0) };
        if status == NO_DEVICE {
            return Err(CudaError::new(
                "the CUDA driver finds no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            ));
        }
        // SAFETY: a valid pointer.
        unsafe {
            check(&api, status, "initialize the CUDA driver")?;
            check(&api, (api.cuDriverGetVersion)(&mut version), "read the driver's version")?;
        }
        if version < OLDEST {
            return Err(CudaError::new(format!(
                "the NVIDIA driver in {} supports CUDA {}; CUDA {} or newer is needed: {}",
                library.path.display(),
                dotted(version),
                dotted(OLDEST),
                loader::DRIVER.install
            )));
        }
        Ok(Driver { api, version, library })
    }

    /// Turns a status into an error that names the action.
    pub fn check(&self, status: Status, action: &str) -> Result<()> {
        check(&self.api, status, action)
    }
}

/// A CUDA version as users know it: 13000 is 13.0.
pub fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Whether a status means that the hardware has failed: the device is unavailable (46), has an uncorrectable ECC (214) or
/// NVLink error (220, 721), a hardware stack error (714), or fell off the bus, which the driver calls unknown (999). A
/// restart on the same device would fail again. Errors that a wrong kernel can cause are not among them.
pub fn is_hardware_failure(status: Status) -> bool {
    matches!(status, 46 | 214 | 220 | 714 | 721 | 999)
}

fn check(api: &Functions, status: Status, action: &str) -> Result<()> {
    if status == SUCCESS {
        return Ok(());
    }
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: both calls store pointers to constant strings, or leave null.
    let words = unsafe {
        (api.cuGetErrorName)(status, &mut name);
        (api.cuGetErrorString)(status, &mut text);
        [name, text].map(|words| match words.is_null() {
            true => format!("status {status}"),
            false => CStr::from_ptr(words).to_string_lossy().into_owned(),
        })
    };
    let [name, text] = words;
    let advice = match status {
        // Illegal address, launch timeout, hardware stack error, illegal instruction, and the like.
        status if is_hardware_failure(status) => {
            "; the device is lost: look for an Xid line in `dmesg`, and reset or replace the GPU"
        }
        700..=719 => {
            "; the device is lost to this process: look for an Xid line in `dmesg` and restart the run"
        }
        _ => "",
    };
    Err(CudaError::new(format!("cannot {action}: {name}, {text}{advice}")))
}
