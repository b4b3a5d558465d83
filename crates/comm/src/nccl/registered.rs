//! Device memory that NCCL allocates and registers, so that it moves data in place instead of through its own buffers.
//!
//! NCCL demands that a call gets registered memory from all members or from none. Memory is therefore allocated for this
//! purpose and registered on all members together; if one of them cannot, none does.

use super::api::{RegisterFunctions, SUCCESS, WINDOW_SYMMETRIC, WindowFunctions};
use super::communicator::{Communicator, HandleSlot, under_watch};
use crate::call::error::Result;
use crate::call::fold::Op;
use crate::device::DeviceSlice;
use crate::group::Group;
use lockstep_cuda::{Address, Gpu, Handle};
use lockstep_types::Dtype;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

/// Device memory of one member, registered with the communicator of its group. Freed when dropped; the GPU must have
/// completed all calls on it.
pub struct RegisteredMemory {
    communicator: Arc<Communicator>,
    gpu: Gpu,
    functions: RegisterFunctions,
    address: Address,
    bytes: usize,
    registration: Registration,
}

enum Registration {
    None,
    /// `ncclCommRegister`.
    Buffer(Handle),
    /// `ncclCommWindowRegister`.
    Window(WindowFunctions, Handle),
}

// SAFETY: the handles are used by one thread at a time, with the lock of the communicator.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as above.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Allocates and registers memory on all members, which call it with the same size. None if the library is too old
    /// or a member has too little memory.
    pub(super) fn allocate(
        communicator: &Arc<Communicator>,
        group: &Group,
        gpu: &Gpu,
        bytes: usize,
    ) -> Result<Option<RegisteredMemory>> {
        let Some(functions) = communicator.api.register else {
            note(group, "the library is older than 2.19");
            return Ok(None);
        };
        // NCCL allocates at least one byte.
        let (bytes, mut address) = (bytes.max(1), 0);
        // NCCL uses the GPU whose context is current.
        gpu.context.api();
        // SAFETY: a valid pointer.
        let status = unsafe { (functions.ncclMemAlloc)(&mut address, bytes) };
        // Freed again if another member has none.
        let memory = (status == SUCCESS).then(|| RegisteredMemory {
            communicator: communicator.clone(),
            gpu: gpu.clone(),
            functions,
            address,
            bytes,
            registration: Registration::None,
        });
        if !all(group, memory.is_some())? {
            note(group, &format!("a member cannot allocate {bytes} bytes"));
            return Ok(None);
        }
        let mut memory = memory.expect("all members have allocated it");
        memory.register(group)?;
        Ok(Some(memory))
    }

    /// Registers the memory as a window, if NCCL can reach it on all members, or else as a buffer.
    fn register(&mut self, group: &Group) -> Result<()> {
        if let Some(functions) = self.communicator.api.windows {
            let window = self.register_window(group, &functions)?;
            if !window.is_null() {
                self.registration = Registration::Window(functions, window);
            }
            if all(group, !window.is_null())? {
                return Ok(());
            }
            self.deregister();
        }
        let mut handle = std::ptr::null_mut();
        let status = self.communicator.locally(|comm| {
            // SAFETY: the communicator lives, and the memory was allocated by NCCL.
            unsafe {
                (self.functions.ncclCommRegister)(comm, self.address, self.bytes, &mut handle)
            }
        });
        if status == SUCCESS {
            self.registration = Registration::Buffer(handle);
        }
        if !all(group, status == SUCCESS)? {
            self.deregister();
            note(group, &self.communicator.api.describe(status));
        }
        Ok(())
    }

    /// Null if the members cannot reach each other's memory.
    fn register_window(&self, group: &Group, functions: &WindowFunctions) -> Result<Handle> {
        under_watch(group, |watch| {
            let slot = HandleSlot::new();
            self.communicator.enqueue(watch, |_, comm| {
                let (at, bytes) = (self.address, self.bytes);
                // SAFETY: as in `register`; the slot stays allocated until the call is complete.
                unsafe {
                    (functions.ncclCommWindowRegister)(comm, at, bytes, slot.0, WINDOW_SYMMETRIC)
                }
            })?;
            let window = slot.get();
            slot.free();
            Ok(window)
        })
    }

    fn deregister(&mut self) {
        let registration = std::mem::replace(&mut self.registration, Registration::None);
        // After a failure the communicator frees the registration when it ends.
        self.communicator.locally(|comm| -> c_int {
            // SAFETY: registered with this communicator, which lives.
            unsafe {
                match registration {
                    Registration::None => SUCCESS,
                    Registration::Buffer(handle) => {
                        (self.functions.ncclCommDeregister)(comm, handle)
                    }
                    Registration::Window(windows, window) => {
                        (windows.ncclCommWindowDeregister)(comm, window)
                    }
                }
            }
        });
    }

    /// How NCCL uses the memory: "window", "buffer", or "none" if it could not be registered.
    pub fn registration(&self) -> &'static str {
        match self.registration {
            Registration::None => "none",
            Registration::Buffer(_) => "buffer",
            Registration::Window(..) => "window",
        }
    }

    /// Elements of the memory.
    ///
    /// # Safety
    /// As for [`DeviceSlice::new`].
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub unsafe fn slice(&self, elements: Range<usize>, dtype: Dtype) -> DeviceSlice {
        let (width, bytes) = (dtype.bytes(), self.bytes);
        let inside = elements.start <= elements.end && elements.end * width <= bytes;
        assert!(inside, "elements {elements:?} of {width} bytes are not inside {bytes} bytes");
        let address = self.address + (elements.start * width) as u64;
        // SAFETY: guaranteed by the caller.
        unsafe { DeviceSlice::new(address, elements.len(), dtype) }
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.gpu.context.api();
        self.deregister();
        // SAFETY: allocated by `allocate`; the caller guarantees that no call uses it.
        unsafe { (self.functions.ncclMemFree)(self.address) };
    }
}

/// Whether it is true on all members.
fn all(group: &Group, own: bool) -> Result<bool> {
    let mut flags = [u8::from(own)];
    group.all_reduce(&mut flags, Op::Min)?;
    Ok(flags[0] == 1)
}

/// Says once per process why memory is not registered.
fn note(group: &Group, why: &str) {
    static NOTED: std::sync::Once = std::sync::Once::new();
    NOTED.call_once(|| {
        tracing::warn!("NCCL does not register memory of group {}: {why}", group.name());
    });
}
