//! CUDA graphs: a sequence of operations that is recorded once and then started with one call.

use std::sync::Arc;

use crate::driver::{CAPTURE_RELAXED, Handle, SUCCESS};
use crate::{Context, Result, Stream};

/// Operations that were recorded from a stream.
pub struct Graph {
    context: Arc<Context>,
    executable: Handle,
}

// SAFETY: handles of the driver may be used from any thread; a graph is launched under the lock of its owner.
unsafe impl Send for Graph {}

impl Graph {
    /// Records the operations that `enqueue` puts on the stream. They are not executed.
    pub fn record(stream: &Stream, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let context = stream.context().clone();
        let (api, driver) = (context.api(), &context.driver);
        // SAFETY: the stream lives. The relaxed mode lets libraries load their kernels meanwhile.
        let status = unsafe { (api.cuStreamBeginCapture_v2)(stream.handle(), CAPTURE_RELAXED) };
        driver.check(status, "begin to record a graph")?;
        let enqueued = enqueue();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is being captured; the pointers are valid.
        unsafe {
            let status = (api.cuStreamEndCapture)(stream.handle(), &mut graph);
            if let Err(error) = enqueued.and(driver.check(status, "record a graph")) {
                if !graph.is_null() {
                    (api.cuGraphDestroy)(graph);
                }
                return Err(error);
            }
            let status = (api.cuGraphInstantiateWithFlags)(&mut executable, graph, 0);
            (api.cuGraphDestroy)(graph);
            driver.check(status, "prepare a graph")?;
        }
        Ok(Graph { context, executable })
    }

    /// Enqueues the recorded operations.
    ///
    /// # Panics
    /// If the launch fails.
    pub fn launch(&self, stream: &Stream) {
        // SAFETY: graph and stream live. The memory that the operations name is the caller's duty, as when they were
        // recorded.
        let status =
            unsafe { (self.context.api().cuGraphLaunch)(self.executable, stream.handle()) };
        if status != SUCCESS {
            self.context.must(status, "start a graph");
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created by `record`. The driver waits until it is not executing.
        unsafe { (self.context.api().cuGraphExecDestroy)(self.executable) };
    }
}
