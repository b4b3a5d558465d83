//! Fences: events that one rank records again and again, and other ranks wait for, in this process or in others.

use std::sync::Arc;

use crate::context::Context;
use crate::driver::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Handle, IpcHandle};
use crate::error::Result;
use crate::stream::Stream;

/// An event without a time. A wait covers the latest record at the time of the call to `wait`.
pub struct Fence {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Fence {}
// SAFETY: as above.
unsafe impl Sync for Fence {}

impl Fence {
    /// A fence for streams of this process.
    pub fn new(context: &Arc<Context>) -> Result<Fence> {
        Fence::create(context, EVENT_DISABLE_TIMING)
    }

    /// A fence that other processes can open.
    pub fn interprocess(context: &Arc<Context>) -> Result<Fence> {
        Fence::create(context, EVENT_DISABLE_TIMING | EVENT_INTERPROCESS)
    }

    fn create(context: &Arc<Context>, flags: u32) -> Result<Fence> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        let status = unsafe { (context.api().cuEventCreate)(&mut handle, flags) };
        context.driver.check(status, "create an event")?;
        Ok(Fence { context: context.clone(), handle })
    }

    /// The name by which other processes open the fence.
    pub fn export(&self) -> Result<[u8; 64]> {
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: an event of `interprocess`, and a valid pointer.
        let status = unsafe { (self.context.api().cuIpcGetEventHandle)(&mut handle, self.handle) };
        self.context.driver.check(status, "share an event with other processes")?;
        Ok(handle.0)
    }

    /// Opens the fence of another process.
    pub fn open(context: &Arc<Context>, name: [u8; 64]) -> Result<Fence> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid pointer; the driver rejects names that are not valid.
        let status = unsafe { (context.api().cuIpcOpenEventHandle)(&mut handle, IpcHandle(name)) };
        context.driver.check(status, "open an event of another process")?;
        Ok(Fence { context: context.clone(), handle })
    }

    /// Records the fence after all operations issued so far on `stream`.
    pub fn record(&self, stream: &Stream) {
        // SAFETY: event and stream live.
        let status = unsafe { (self.context.api().cuEventRecord)(self.handle, stream.handle()) };
        self.context.must(status, "record an event");
    }

    /// Later operations of `stream` wait for the latest record.
    pub fn wait(&self, stream: &Stream) {
        // SAFETY: event and stream live.
        let status =
            unsafe { (self.context.api().cuStreamWaitEvent)(stream.handle(), self.handle, 0) };
        self.context.must(status, "wait for an event of another rank");
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // SAFETY: created by `create` or `open`; the driver keeps it until it is complete.
        unsafe { (self.context.api().cuEventDestroy_v2)(self.handle) };
    }
}
