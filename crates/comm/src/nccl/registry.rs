//! Memory that is registered with a communicator. NCCL then reads and writes buffers in place, where it would otherwise copy
//! through buffers of its own.
//!
//! NCCL wants the buffers of all members of a call to be registered, or none. So the memory of every buffer is, when a
//! collective first uses it: the whole allocation that contains the buffer. A buffer must not span two. NCCL would accept
//! that, but it maps only the allocations of the first buffer that it looks at to the other members, and uses this mapping
//! for all buffers of the registration.

use super::api::{Api, RegistrationFunctions, SUCCESS};
use crate::device::DeviceSlice;
use lockstep_cuda::driver::{BUFFER_ID, MemoryFunctions};
use lockstep_cuda::{Address, Context, CudaError, Handle};
use std::ffi::c_int;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The registered memory of one communicator, which forgets it when it is destroyed.
pub(super) struct Registry {
    functions: RegistrationFunctions,
    memory: MemoryFunctions,
    context: Arc<Context>,
    registered: Mutex<Vec<Registered>>,
}

/// An allocation of device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    addresses: Range<Address>,
    /// Differs from the ids of all earlier allocations of the process, also of those at the same address.
    id: u64,
}

struct Registered {
    allocation: Allocation,
    handle: RegistrationHandle,
}

struct RegistrationHandle(Handle);

// SAFETY: NCCL takes it from any thread, one at a time.
unsafe impl Send for RegistrationHandle {}

impl Registry {
    /// Fails if NCCL is too old.
    pub fn new(context: Arc<Context>) -> Result<Registry, CudaError> {
        let functions = Api::get()?.registration()?;
        let memory = MemoryFunctions::load(&context.driver.library)?;
        Ok(Registry { functions, memory, context, registered: Mutex::default() })
    }

    /// The allocations of buffers. Fails if a buffer spans two.
    pub fn allocations(
        &self,
        buffers: impl Iterator<Item = DeviceSlice>,
    ) -> Result<Vec<Allocation>, String> {
        buffers.filter(|buffer| !buffer.is_empty()).map(|buffer| self.allocation(buffer)).collect()
    }

    fn allocation(&self, buffer: DeviceSlice) -> Result<Allocation, String> {
        let (mut start, mut bytes, mut id) = (0, 0, 0u64);
        self.context.api();
        // SAFETY: valid pointers; the attribute has this type.
        unsafe {
            let at = buffer.address();
            let status = (self.memory.cuMemGetAddressRange_v2)(&mut start, &mut bytes, at);
            self.context.must(status, "find the allocation of a buffer");
            let status =
                (self.memory.cuPointerGetAttribute)((&raw mut id).cast(), BUFFER_ID, start);
            self.context.must(status, "identify the allocation of a buffer");
        }
        let (end, last) = (start + bytes as u64, buffer.address() + buffer.bytes() as u64);
        if last > end {
            return Err(format!(
                "a buffer of {} bytes spans two allocations of device memory and cannot be registered with NCCL; set \
                 comm.register_buffers=false",
                buffer.bytes()
            ));
        }
        Ok(Allocation { addresses: start..end, id })
    }

    /// Registers allocations with the registry's communicator. Returns NCCL's first status that is not a success.
    pub fn register_all(&self, comm: Handle, allocations: &[Allocation]) -> c_int {
        let mut statuses = allocations.iter().map(|allocation| self.register(comm, allocation));
        statuses.find(|status| *status != SUCCESS).unwrap_or(SUCCESS)
    }

    /// Registers an allocation, if it is not yet.
    fn register(&self, comm: Handle, allocation: &Allocation) -> c_int {
        let mut registered = self.registered.lock().unwrap_or_else(|failed| failed.into_inner());
        if registered.iter().any(|one| one.allocation == *allocation) {
            return SUCCESS;
        }
        let Range { start, end } = allocation.addresses;
        // These were freed: their addresses mean other memory now.
        let freed = |one: &mut Registered| {
            let other = &one.allocation.addresses;
            other.start < end && start < other.end
        };
        for Registered { handle, .. } in registered.extract_if(.., freed) {
            // SAFETY: the communicator lives, and the handle is one of its own.
            let status = unsafe { (self.functions.ncclCommDeregister)(comm, handle.0) };
            if status != SUCCESS {
                return status;
            }
        }
        let (bytes, mut handle) = ((end - start) as usize, std::ptr::null_mut());
        // SAFETY: the communicator lives; the addresses are those of an allocation.
        let status = unsafe { (self.functions.ncclCommRegister)(comm, start, bytes, &mut handle) };
        if status == SUCCESS {
            let (allocation, handle) = (allocation.clone(), RegistrationHandle(handle));
            registered.push(Registered { allocation, handle });
        }
        status
    }
}
