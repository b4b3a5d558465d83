//! Streams and events: the order of operations on a GPU, and points in it that the host or another stream waits for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::context::Context;
use crate::driver::{Handle, NON_BLOCKING, NOT_READY};

/// A sequence of operations that the GPU executes in order.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
    /// Events that were dropped and can be recorded again.
    idle: Arc<Mutex<Vec<RawEvent>>>,
}

struct RawEvent(Handle);

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A point in a stream.
pub struct StreamEvent {
    context: Arc<Context>,
    handle: Handle,
    idle: Arc<Mutex<Vec<RawEvent>>>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for StreamEvent {}
// SAFETY: as above.
unsafe impl Sync for StreamEvent {}

impl Stream {
    pub fn new(context: Arc<Context>) -> Stream {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        let status = unsafe { (context.api().cuStreamCreate)(&mut handle, NON_BLOCKING) };
        context.must(status, "create a stream");
        Stream { context, handle, idle: Arc::default() }
    }

    pub fn handle(&self) -> Handle {
        self.handle
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Later operations of this stream wait for the event.
    pub fn wait_for(&self, event: &StreamEvent) {
        // SAFETY: stream and event live.
        let status =
            unsafe { (self.context.api().cuStreamWaitEvent)(self.handle, event.handle, 0) };
        self.context.must(status, "wait for an event of another stream");
    }

    /// Blocks the host until all operations issued so far are complete.
    pub fn synchronize(&self) {
        // SAFETY: the stream lives.
        let status = unsafe { (self.context.api().cuStreamSynchronize)(self.handle) };
        self.context.must(status, "complete the operations of a stream");
    }

    /// As `synchronize`, when nothing is to be done about a failure.
    pub fn drain(&self) {
        // SAFETY: the stream lives.
        unsafe { (self.context.api().cuStreamSynchronize)(self.handle) };
    }

    /// Records an event after all operations issued so far.
    pub fn record(&self) -> StreamEvent {
        let idle = self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop();
        let handle = idle.map_or_else(|| self.create_event(), |event| event.0);
        // SAFETY: event and stream live.
        let status = unsafe { (self.context.api().cuEventRecord)(handle, self.handle) };
        self.context.must(status, "record an event");
        StreamEvent { context: self.context.clone(), handle, idle: self.idle.clone() }
    }

    fn create_event(&self) -> Handle {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        let status = unsafe { (self.context.api().cuEventCreate)(&mut handle, 0) };
        self.context.must(status, "create an event");
        handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let events =
            std::mem::take(&mut *self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        // SAFETY: created by `new` and `create_event`.
        unsafe {
            for event in &events {
                (self.context.api().cuEventDestroy_v2)(event.0);
            }
            (self.context.api().cuStreamDestroy_v2)(self.handle);
        }
    }
}

impl StreamEvent {
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Blocks the host until the GPU has reached the event.
    pub fn wait(&self) {
        // SAFETY: the event lives.
        let status = unsafe { (self.context.api().cuEventSynchronize)(self.handle) };
        self.context.must(status, "complete the operations before an event");
    }

    /// Whether the GPU has reached the event. Also true if the device is lost: the next operation reports that.
    pub fn is_complete(&self) -> bool {
        // SAFETY: the event lives.
        unsafe { (self.context.api().cuEventQuery)(self.handle) != NOT_READY }
    }

    /// Time between two events; zero if `earlier` was reached later. Waits for both.
    pub fn elapsed_since(&self, earlier: &StreamEvent) -> Duration {
        self.wait();
        earlier.wait();
        let mut milliseconds = 0.0;
        // SAFETY: both events live and are complete.
        let status = unsafe {
            (self.context.api().cuEventElapsedTime)(&mut milliseconds, earlier.handle, self.handle)
        };
        self.context.must(status, "read the time between events");
        Duration::from_secs_f64(milliseconds.max(0.0) as f64 * 1e-3)
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        self.idle
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .push(RawEvent(self.handle));
    }
}
