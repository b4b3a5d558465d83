//! A GPU's context: the driver, the properties of the device, and raw memory.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;

use crate::driver::{self, Address, Attribute, Driver, Handle};
use crate::error::{CudaError, Result};
use crate::lost::DeviceLost;

/// The oldest supported compute capability.
const OLDEST_CAPABILITY: (i32, i32) = (8, 0);

/// The primary context of one GPU. It is released when the last user drops it.
pub struct Context {
    pub driver: Driver,
    pub index: usize,
    pub name: String,
    pub capability: (i32, i32),
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may use.
    pub shared_per_block: usize,
    pub total_bytes: usize,
    device: c_int,
    handle: Handle,
}

// SAFETY: a context may be current in several threads at the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

thread_local! {
    /// The context that is current in this thread.
    static CURRENT: Cell<Handle> = const { Cell::new(std::ptr::null_mut()) };
}

impl Context {
    pub fn new(index: usize) -> Result<Arc<Context>> {
        let driver = Driver::load()?;
        let api = driver.api;
        let (mut device, mut handle) = (0, std::ptr::null_mut());
        let count = count(&driver)?;
        if index >= count {
            return Err(CudaError::new(format!(
                "there is no GPU {index}: this machine has {count}; start at most one rank per GPU or set CUDA_VISIBLE_DEVICES"
            )));
        }
        let open = format!("open GPU {index}");
        // SAFETY: plain calls of the driver API with valid pointers, here and below.
        driver.check(unsafe { (api.cuDeviceGet)(&mut device, index as c_int) }, &open)?;
        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: valid pointers.
            let status =
                unsafe { (api.cuDeviceGetAttribute)(&mut value, attribute as c_int, device) };
            driver.check(status, "read an attribute of the GPU").map(|()| value)
        };
        let mut name = [0; 256];
        // SAFETY: valid pointers.
        let status = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr(), 255, device) };
        driver.check(status, "read the name of the GPU")?;
        // SAFETY: the driver ends the name with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let capability = (attribute(Attribute::Major)?, attribute(Attribute::Minor)?);
        if capability < OLDEST_CAPABILITY {
            return Err(CudaError::new(format!(
                "GPU {index} ({name}) has compute capability {}.{}; {}.{} (Ampere) or newer is needed",
                capability.0, capability.1, OLDEST_CAPABILITY.0, OLDEST_CAPABILITY.1
            )));
        }
        let multiprocessors = attribute(Attribute::Multiprocessors)? as usize;
        let shared_per_block = attribute(Attribute::SharedPerBlock)? as usize;
        let mut total_bytes = 0;
        // SAFETY: valid pointers.
        let status = unsafe { (api.cuDeviceTotalMem_v2)(&mut total_bytes, device) };
        driver.check(status, "read the memory size of the GPU")?;
        // SAFETY: valid pointers.
        let status = unsafe { (api.cuDevicePrimaryCtxRetain)(&mut handle, device) };
        driver.check(status, &format!("open a context on GPU {index} ({name})"))?;
        Ok(Arc::new(Context {
            driver,
            index,
            name,
            capability,
            multiprocessors,
            shared_per_block,
            total_bytes,
            device,
            handle,
        }))
    }

    /// Makes the context current in this thread and returns the driver's functions.
    pub fn api(&self) -> &driver::Functions {
        CURRENT.with(|current| {
            if current.get() != self.handle {
                // SAFETY: the context lives as long as `self`.
                let status = unsafe { (self.driver.api.cuCtxSetCurrent)(self.handle) };
                self.must(status, "make the context current");
                current.set(self.handle);
            }
        });
        &self.driver.api
    }

    /// Checks a call that fails only if the device is lost or the program is wrong.
    ///
    /// # Panics
    /// If the call failed. If the hardware failed, the panic's payload is a [`DeviceLost`].
    #[track_caller]
    pub fn must(&self, status: c_int, action: &str) {
        let Err(error) = self.driver.check(status, action) else { return };
        let message = format!("GPU {} ({}): {error}", self.index, self.name);
        if !driver::is_hardware_failure(status) {
            panic!("{message}");
        }
        let address = self.bus_id().map(|id| id.to_string_lossy().to_lowercase());
        let xid = address.and_then(|address| crate::lost::last_xid(&address));
        std::panic::panic_any(DeviceLost::new(message, xid));
    }

    /// Free bytes of device memory.
    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid pointers.
        self.must(
            unsafe { (self.api().cuMemGetInfo_v2)(&mut free, &mut total) },
            "read free memory",
        );
        free
    }

    /// A piece of device memory outside the pool.
    pub fn allocate(self: &Arc<Self>, bytes: usize, purpose: &str) -> Result<DeviceBuffer> {
        let mut address = 0;
        // SAFETY: a valid pointer.
        let status = unsafe { (self.api().cuMemAlloc_v2)(&mut address, bytes.max(256)) };
        if status == driver::OUT_OF_MEMORY {
            return Err(CudaError::new(format!(
                "GPU {} ({}) has no {} MiB left for {purpose}: {} of {} MiB are free",
                self.index,
                self.name,
                bytes >> 20,
                self.free_bytes() >> 20,
                self.total_bytes >> 20
            )));
        }
        self.driver.check(status, &format!("allocate {bytes} bytes for {purpose}"))?;
        Ok(DeviceBuffer { context: self.clone(), address, bytes })
    }

    /// Page-locked host memory, which the device can also address.
    pub fn allocate_pinned(self: &Arc<Self>, bytes: usize) -> Result<PinnedBuffer> {
        let mut start = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        let status =
            unsafe { (self.api().cuMemHostAlloc)(&mut start, bytes.max(1), driver::HOST_PORTABLE) };
        self.driver.check(status, &format!("allocate {bytes} bytes of page-locked host memory"))?;
        Ok(PinnedBuffer { context: self.clone(), start, bytes })
    }

    /// Opens a buffer of another process by the name that [`DeviceBuffer::export`] gave it there.
    pub fn open_peer(self: &Arc<Self>, name: [u8; 64]) -> Result<PeerBuffer> {
        let mut address = 0;
        let (handle, flags) = (driver::IpcHandle(name), driver::IPC_LAZY_PEER_ACCESS);
        // SAFETY: a valid pointer; the driver rejects names that are not valid.
        let status = unsafe { (self.api().cuIpcOpenMemHandle_v2)(&mut address, handle, flags) };
        self.driver.check(status, "open the memory of another process")?;
        Ok(PeerBuffer { context: self.clone(), address })
    }

    /// The PCI address, by which other libraries name the GPU.
    pub fn bus_id(&self) -> Option<CString> {
        let mut id = [0; 32];
        // SAFETY: the buffer has this length; the driver ends the text with a zero.
        unsafe {
            let status = (self.driver.api.cuDeviceGetPCIBusId)(id.as_mut_ptr(), 31, self.device);
            (status == driver::SUCCESS).then(|| CStr::from_ptr(id.as_ptr()).to_owned())
        }
    }

    /// Identifies the GPU among all machines.
    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = [0; 16];
        // SAFETY: a valid pointer.
        let status = unsafe { (self.driver.api.cuDeviceGetUuid_v2)(&mut uuid, self.device) };
        self.must(status, "read the UUID of the GPU");
        uuid
    }

    /// Blocks the host until the GPU has completed all operations of this process.
    pub fn synchronize(&self) {
        // SAFETY: a plain call; the context is current.
        let status = unsafe { (self.api().cuCtxSynchronize)() };
        self.must(status, "complete all operations");
    }

    pub fn device(&self) -> c_int {
        self.device
    }

    /// Whether the device has a property; false if the driver does not know it.
    pub(crate) fn has(&self, attribute: Attribute) -> bool {
        let mut value = 0;
        let api = &self.driver.api;
        // SAFETY: a valid pointer.
        let status =
            unsafe { (api.cuDeviceGetAttribute)(&mut value, attribute as c_int, self.device) };
        status == driver::SUCCESS && value != 0
    }
}

/// Number of GPUs that the driver finds.
pub fn count(driver: &Driver) -> Result<usize> {
    let mut count = 0;
    // SAFETY: a valid pointer.
    driver.check(unsafe { (driver.api.cuDeviceGetCount)(&mut count) }, "count the GPUs")?;
    Ok(count as usize)
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `new`.
        unsafe { (self.driver.api.cuDevicePrimaryCtxRelease_v2)(self.device) };
        CURRENT.with(|current| current.set(std::ptr::null_mut()));
    }
}

/// Device memory that is freed when dropped.
pub struct DeviceBuffer {
    context: Arc<Context>,
    pub address: Address,
    pub bytes: usize,
}

impl DeviceBuffer {
    /// The name by which other processes open the buffer.
    pub fn export(&self) -> Result<[u8; 64]> {
        let mut handle = driver::IpcHandle([0; 64]);
        // SAFETY: an allocation of this context, and a valid pointer.
        let status = unsafe { (self.context.api().cuIpcGetMemHandle)(&mut handle, self.address) };
        self.context.driver.check(status, "share memory with other processes")?;
        Ok(handle.0)
    }
}

/// Memory of another process on the same GPU. It is closed when dropped.
pub struct PeerBuffer {
    context: Arc<Context>,
    pub address: Address,
}

impl Drop for PeerBuffer {
    fn drop(&mut self) {
        // SAFETY: opened by `Context::open_peer`. The driver waits for the work that uses it.
        unsafe { (self.context.api().cuIpcCloseMemHandle)(self.address) };
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Context::allocate`. The driver waits for the work that uses it.
        unsafe { (self.context.api().cuMemFree_v2)(self.address) };
    }
}

/// Page-locked host memory that is freed when dropped.
pub struct PinnedBuffer {
    context: Arc<Context>,
    pub start: *mut c_void,
    pub bytes: usize,
}

// SAFETY: plain memory.
unsafe impl Send for PinnedBuffer {}
// SAFETY: plain memory; users of the pointer synchronize.
unsafe impl Sync for PinnedBuffer {}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Context::allocate_pinned`.
        unsafe { (self.context.api().cuMemFreeHost)(self.start) };
    }
}
