//! A communicator of NCCL: created over the group's own connections, polled under a watch, aborted when the world breaks.

use super::api::{Api, Config, Functions, IN_PROGRESS, REMOTE_ERROR, SUCCESS, UniqueId};
use crate::call::Algo;
use crate::call::error::{Cause, Error, Failure, Result};
use crate::device::DeviceArgs;
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use crate::health::board::Board;
use crate::health::watch::Watch;
use lockstep_cuda::{Gpu, Handle};
use lockstep_types::Dtype;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Blocks of NCCL's kernels that fit on a GPU at the same time, over all ranks that share it. More hang.
const CTAS_OF_A_GPU: usize = 32;

/// How long the reason of a failure that NCCL noticed first may take to arrive.
const GRACE: Duration = Duration::from_secs(3);

/// How long the members may take to end a communicator together. Then it is aborted.
const ENDING: Duration = Duration::from_secs(2);

/// Polls without a pause, which accept an ordinary call, and the pause between later ones.
const POLLS: u32 = 2000;
const PAUSE: Duration = Duration::from_micros(20);

pub(super) struct Communicator {
    pub api: &'static Api,
    /// None after an abort.
    handle: Mutex<Option<CommHandle>>,
    /// Shows whether the world is broken.
    board: Arc<Board>,
}

#[derive(Clone, Copy)]
struct CommHandle(Handle);

// SAFETY: a communicator may be used from any thread, one at a time.
unsafe impl Send for CommHandle {}

impl Communicator {
    pub fn open(group: &Group, gpu: &Gpu, sharing: usize) -> Result<Communicator> {
        let api = Api::get().map_err(|error| group.misuse(error.to_string()))?;
        let mut id = UniqueId([0; 128]);
        if group.rank() == 0 {
            // SAFETY: a valid pointer.
            let status = unsafe { (api.functions.ncclGetUniqueId)(&mut id) };
            if status != SUCCESS {
                return Err(group.misuse(api.describe(status)));
            }
        }
        group.broadcast(&mut id.0, 0)?;
        let (inner, track) = (&group.inner, &group.inner.track);
        track.run(|number, _| {
            let barrier: DeviceArgs<'_> = CollectiveArgs::Barrier;
            let call = inner.collective_call(&barrier, (Algo::Nccl, Dtype::U8), number);
            inner.recorded(call, inner.spin_policy(false), |watch| {
                let max_ctas = (sharing > 1).then(|| (CTAS_OF_A_GPU / sharing).max(1));
                let (mut config, mut handle) = (Config::new(max_ctas), std::ptr::null_mut());
                // NCCL uses the GPU whose context is current.
                gpu.context.api();
                // SAFETY: valid pointers; the id is that of member 0.
                let status = unsafe {
                    (api.functions.ncclCommInitRankConfig)(
                        &mut handle,
                        group.size() as c_int,
                        id,
                        group.rank() as c_int,
                        &mut config,
                    )
                };
                let board = watch.board.clone();
                let created = Mutex::new(Some(CommHandle(handle)));
                let communicator = Communicator { api, handle: created, board };
                match communicator.settle(&watch, handle, status) {
                    Ok(()) => Ok(communicator),
                    Err(error) => {
                        communicator.abort();
                        Err(error)
                    }
                }
            })
        })
    }

    /// Enqueues calls. Fails if the communicator was aborted or reports an error.
    pub fn enqueue(
        &self,
        watch: &Watch,
        calls: impl FnOnce(&Functions, Handle) -> c_int,
    ) -> Result<()> {
        let handle = self.lock();
        let Some(CommHandle(comm)) = *handle else {
            watch.check_intact()?;
            return Err(self.failed(watch, SUCCESS));
        };
        let status = calls(&self.api.functions, comm);
        self.settle(watch, comm, status)
    }

    /// Waits until the communicator has accepted a call, which takes long only for the first ones.
    fn settle(&self, watch: &Watch, comm: Handle, mut status: c_int) -> Result<()> {
        let mut polls = 0;
        while status == IN_PROGRESS {
            watch.check_intact()?;
            if watch.started.elapsed() > watch.timeout {
                let peer = watch.rank;
                watch.check(peer)?;
            }
            polls += 1;
            match polls < POLLS {
                true => std::thread::yield_now(),
                false => std::thread::sleep(PAUSE),
            }
            status = self.status_of(comm);
        }
        match status {
            SUCCESS => Ok(()),
            status => Err(self.failed(watch, status)),
        }
    }

    /// The error of a call that NCCL could not perform. If a peer is the reason, the world is about to break with it.
    pub fn failed(&self, watch: &Watch, status: c_int) -> Error {
        let grace = if status == REMOTE_ERROR { GRACE } else { Duration::from_millis(200) };
        if let Some(failure) = watch.board.wait_for_alarm(grace) {
            return watch.error(None, failure);
        }
        let text = format!(
            "rank {} cannot perform {} of group {}: {}",
            watch.rank,
            watch.call,
            watch.group_name,
            self.api.describe(status)
        );
        watch.raise(None, Failure { culprit: watch.rank, cause: Cause::Failed, text })
    }

    /// The asynchronous status; success if the communicator was aborted.
    pub fn status(&self) -> c_int {
        self.lock().map_or(SUCCESS, |CommHandle(comm)| self.status_of(comm))
    }

    fn status_of(&self, comm: Handle) -> c_int {
        let mut status = SUCCESS;
        // SAFETY: the communicator lives; a valid pointer.
        let called = unsafe { (self.api.functions.ncclCommGetAsyncError)(comm, &mut status) };
        if called == SUCCESS { status } else { called }
    }

    /// Ends all calls of the communicator: streams that wait for them go on.
    pub fn abort(&self) {
        if let Some(CommHandle(comm)) = self.lock().take()
            && !comm.is_null()
        {
            // SAFETY: the communicator lives and is not used afterwards.
            unsafe { (self.api.functions.ncclCommAbort)(comm) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<CommHandle>> {
        self.handle.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Communicator {
    /// Ends the communicator together with the other members. False if they do not take part.
    fn finalize(&self, comm: Handle) -> bool {
        // SAFETY: the communicator lives, and all its calls are complete.
        let mut status = unsafe { (self.api.functions.ncclCommFinalize)(comm) };
        let begun = Instant::now();
        while status == IN_PROGRESS && begun.elapsed() < ENDING && self.board.alarm().is_none() {
            std::thread::sleep(PAUSE);
            status = self.status_of(comm);
        }
        status == SUCCESS
    }
}

/// In a broken world the communicator is aborted: destroying it would wait for members that are gone.
impl Drop for Communicator {
    fn drop(&mut self) {
        let Some(CommHandle(comm)) = *self.lock() else { return };
        if comm.is_null() {
            return;
        }
        if self.board.alarm().is_none() && self.finalize(comm) {
            // SAFETY: the communicator lives and is not used afterwards.
            unsafe { (self.api.functions.ncclCommDestroy)(comm) };
        } else {
            self.abort();
        }
    }
}
