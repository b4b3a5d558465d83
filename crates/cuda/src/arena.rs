//! Device memory that grows: one range of addresses, whose end is backed by more memory when it is needed. Free memory at the
//! end is thus extended instead of wasted. Each extension is an allocation of its own to the driver.

use std::sync::Arc;

use crate::Context;
use crate::driver::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDescription, Address, AllocationProperties,
    Attribute, HANDLE_POSIX_FILE, LOCATION_DEVICE, MemoryLocation, OUT_OF_MEMORY, SUCCESS,
};

/// Physical memory is mapped in multiples of this: 32 pages of 2 MiB.
const STEP: usize = 64 << 20;

/// A growing range of device memory.
pub struct Arena {
    context: Arc<Context>,
    start: Address,
    reserved: usize,
    /// Physical allocations, with their sizes, in the order of their addresses.
    mapped: Vec<(u64, usize)>,
}

impl Arena {
    /// Reserves addresses for all the memory of the GPU. Takes no memory yet.
    pub fn new(context: Arc<Context>) -> Arena {
        let (mut start, reserved) = (0, context.total_bytes.next_multiple_of(STEP));
        // SAFETY: a valid pointer.
        let status = unsafe { (context.api().cuMemAddressReserve)(&mut start, reserved, 0, 0, 0) };
        context.must(status, "reserve addresses for device memory");
        Arena { context, start, reserved, mapped: Vec::new() }
    }

    /// At least `bytes` of memory until it is dropped; nothing if the GPU has no memory left. To free memory that was
    /// allocated instead of mapped would wait for all kernels of the process, some of which may wait for other ranks.
    pub fn of(context: Arc<Context>, bytes: usize) -> Option<Arena> {
        let mut arena = Arena::new(context);
        arena.grow(bytes)?;
        Some(arena)
    }

    /// The first address.
    pub fn start(&self) -> Address {
        self.start
    }

    /// Bytes that are backed by memory.
    pub fn bytes(&self) -> usize {
        self.mapped.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Backs at least `bytes` more. Returns how many, or nothing if the GPU has no memory left.
    pub fn grow(&mut self, bytes: usize) -> Option<usize> {
        let (bytes, used) = (bytes.next_multiple_of(STEP), self.bytes());
        if used + bytes > self.reserved {
            return None;
        }
        let location = MemoryLocation { kind: LOCATION_DEVICE, id: self.context.device() };
        let (shares, rdma) =
            (self.context.has(Attribute::SharesMapped), self.context.has(Attribute::RdmaMapped));
        // NCCL can register such memory.
        let mut properties = AllocationProperties {
            kind: ALLOCATION_PINNED,
            handle_types: if shares { HANDLE_POSIX_FILE } else { 0 },
            location,
            metadata: std::ptr::null_mut(),
            compression: 0,
            rdma: u8::from(rdma),
            reserved: [0; 6],
        };
        let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
        let (api, at, mut handle) = (self.context.api(), self.start + used as u64, 0);
        // SAFETY: the range lies in the reserved addresses and is not mapped yet.
        unsafe {
            let mut status = (api.cuMemCreate)(&mut handle, bytes, &properties, 0);
            if ![SUCCESS, OUT_OF_MEMORY].contains(&status) && shares {
                // A sandbox may not allow what the device can do.
                (properties.handle_types, properties.rdma) = (0, 0);
                status = (api.cuMemCreate)(&mut handle, bytes, &properties, 0);
            }
            if status == OUT_OF_MEMORY {
                return None;
            }
            self.context.must(status, "allocate device memory");
            self.context.must((api.cuMemMap)(at, bytes, 0, handle, 0), "map device memory");
            let status = (api.cuMemSetAccess)(at, bytes, &access, 1);
            self.context.must(status, "make device memory accessible");
        }
        self.mapped.push((handle, bytes));
        Some(bytes)
    }

    /// Free and total memory of the GPU, for the message of an allocation that failed.
    pub fn describe(&self) -> String {
        let Context { index, name, total_bytes, .. } = &*self.context;
        let free = self.context.free_bytes();
        format!("GPU {index} ({name}): {} of {} MiB are free", free >> 20, total_bytes >> 20)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let api = self.context.api();
        let mut at = self.start;
        for &(handle, bytes) in &self.mapped {
            // SAFETY: mapped by `grow`. Nothing uses it: tensors keep their pool alive, and trials have waited for their work.
            unsafe {
                (api.cuMemUnmap)(at, bytes);
                (api.cuMemRelease)(handle);
            }
            at += bytes as u64;
        }
        // SAFETY: reserved by `new`.
        unsafe { (api.cuMemAddressFree)(self.start, self.reserved) };
    }
}
