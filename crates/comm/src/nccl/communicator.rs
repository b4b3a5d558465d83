//! A communicator of NCCL: created over the group's own connections or split from another, polled under a watch, aborted
//! when the world breaks.

use super::api::{
    Api, Config, Functions, IN_PROGRESS, INTERNAL_ERROR, NO_COLOR, REMOTE_ERROR, SUCCESS, UniqueId,
};
use super::watcher::missing;
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

pub(crate) struct Communicator {
    pub(super) api: &'static Api,
    /// None after an abort.
    handle: Mutex<Option<CommHandle>>,
    /// Shows whether the world is broken.
    board: Arc<Board>,
    /// The largest number of blocks per kernel; none if NCCL chooses.
    max_ctas: Option<usize>,
}

#[derive(Clone, Copy)]
struct CommHandle(Handle);

// SAFETY: a communicator may be used from any thread, one at a time.
unsafe impl Send for CommHandle {}

/// Members of a new communicator, and our index among them.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub me: usize,
    pub members: usize,
}

impl Communicator {
    /// Creates a communicator of all members of a group, `sharing` of which use one GPU at most. All members call it.
    pub fn open(group: &Group, gpu: &Gpu, sharing: usize) -> Result<Communicator> {
        let api = Api::get().map_err(|error| group.misuse(error.to_string()))?;
        let mut id = UniqueId::EMPTY;
        if group.rank() == 0 {
            id = new_id(api).map_err(|status| group.misuse(api.describe(status)))?;
        }
        group.broadcast(&mut id.0, 0)?;
        let place = Place { me: group.rank(), members: group.size() };
        let max_ctas = (sharing > 1).then(|| (CTAS_OF_A_GPU / sharing).max(1));
        under_watch(group, |watch| {
            Communicator::create(api, (watch, group.members()), gpu, (id, place), max_ctas)
        })
    }

    /// Creates a communicator with the unique id of its member 0. All `members`, by their world ranks, call it.
    pub(super) fn create(
        api: &'static Api,
        (watch, members): (&Watch, &[usize]),
        gpu: &Gpu,
        (id, place): (UniqueId, Place),
        max_ctas: Option<usize>,
    ) -> Result<Communicator> {
        let (mut config, slot) = (Config::new(max_ctas), HandleSlot::new());
        // NCCL uses the GPU whose context is current.
        gpu.context.api();
        // SAFETY: valid pointers; the id is that of member 0.
        let status = unsafe {
            (api.functions.ncclCommInitRankConfig)(
                slot.0,
                place.members as c_int,
                id,
                place.me as c_int,
                &mut config,
            )
        };
        let handle = slot.get();
        let communicator = Communicator::of(api, handle, watch, max_ctas);
        match communicator.settle((watch, members), handle, status) {
            Ok(()) => {
                slot.free();
                Ok(communicator)
            }
            Err(error) => {
                communicator.abort();
                Err(error)
            }
        }
    }

    /// Creates a communicator of some members of this one, whose calls are all complete: of those with the same color,
    /// in the order of their keys. All members call it; those without a color get none.
    pub fn split(
        &self,
        (watch, members): (&Watch, &[usize]),
        color_and_key: Option<(usize, usize)>,
    ) -> Result<Option<Communicator>> {
        let (mut config, slot) = (Config::new(self.max_ctas), HandleSlot::new());
        let (color, key) =
            color_and_key.map_or((NO_COLOR, 0), |(color, key)| (color as c_int, key as c_int));
        self.enqueue((watch, members), |functions, comm| {
            // SAFETY: the communicator lives, and the slot stays allocated until the split is complete.
            unsafe { (functions.ncclCommSplit)(comm, color, key, slot.0, &mut config) }
        })?;
        // Written when this communicator was ready again.
        let handle = slot.get();
        slot.free();
        match (color_and_key, handle.is_null()) {
            (None, _) => Ok(None),
            (Some(_), true) => Err(self.failed(watch, INTERNAL_ERROR)),
            (Some(_), false) => {
                let split = Communicator::of(self.api, handle, watch, self.max_ctas);
                split.settle((watch, members), handle, SUCCESS)?;
                Ok(Some(split))
            }
        }
    }

    fn of(
        api: &'static Api,
        handle: Handle,
        watch: &Watch,
        max_ctas: Option<usize>,
    ) -> Communicator {
        let (handle, board) = (Mutex::new(Some(CommHandle(handle))), watch.board.clone());
        Communicator { api, handle, board, max_ctas }
    }

    /// Enqueues calls of `members`, by their world ranks. Fails if the communicator was aborted or reports an error.
    pub fn enqueue(
        &self,
        (watch, members): (&Watch, &[usize]),
        calls: impl FnOnce(&Functions, Handle) -> c_int,
    ) -> Result<()> {
        let handle = self.lock();
        let Some(CommHandle(comm)) = *handle else {
            watch.check_intact()?;
            return Err(self.failed(watch, SUCCESS));
        };
        let status = calls(&self.api.functions, comm);
        let settled = self.settle((watch, members), comm, status);
        drop(handle);
        if settled.is_err() {
            // Otherwise the call could still be accepted, and then wait for ranks that are gone.
            self.abort();
        }
        settled
    }

    /// Waits until the communicator has accepted a call, which takes long only for the first ones.
    ///
    /// Asks the communicator even if the call has returned a success: some functions, such as `ncclCommSplit`, return it
    /// before they have done their work, and write their results later.
    fn settle(
        &self,
        (watch, members): (&Watch, &[usize]),
        comm: Handle,
        mut status: c_int,
    ) -> Result<()> {
        let mut polls = 0;
        if status == SUCCESS {
            status = self.status_of(comm);
        }
        while status == IN_PROGRESS {
            // The first calls connect the members.
            watch.check_often(|| missing(members, watch))?;
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
        cannot(watch, &self.api.describe(status))
    }

    /// The asynchronous status; success if the communicator was aborted. Never waits for a call that is being enqueued.
    pub fn status(&self) -> c_int {
        match self.handle.try_lock() {
            Ok(handle) => handle.map_or(SUCCESS, |CommHandle(comm)| self.status_of(comm)),
            Err(_) => IN_PROGRESS,
        }
    }

    fn status_of(&self, comm: Handle) -> c_int {
        let mut status = SUCCESS;
        // SAFETY: the communicator lives; a valid pointer.
        let called = unsafe { (self.api.functions.ncclCommGetAsyncError)(comm, &mut status) };
        if called == SUCCESS { status } else { called }
    }

    /// Ends all calls of the communicator: streams that wait for them go on.
    pub fn abort(&self) {
        // Not under the lock: it takes long if other members of this process have not aborted theirs yet.
        let taken = self.lock().take();
        if let Some(CommHandle(comm)) = taken
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

/// A unique id, with which the members of a communicator find each other.
pub(super) fn new_id(api: &Api) -> std::result::Result<UniqueId, c_int> {
    let mut id = UniqueId::EMPTY;
    // SAFETY: a valid pointer.
    let status = unsafe { (api.functions.ncclGetUniqueId)(&mut id) };
    if status == SUCCESS { Ok(id) } else { Err(status) }
}

/// Performs a collective step of a group on its communicator, with a deadline and a name.
pub(super) fn under_watch<R>(group: &Group, step: impl FnOnce(&Watch) -> Result<R>) -> Result<R> {
    let (inner, track) = (&group.inner, &group.inner.track);
    track.run(|number, _| {
        let barrier: DeviceArgs<'_> = CollectiveArgs::Barrier;
        let call = inner.collective_call(&barrier, (Algo::Nccl, Dtype::U8), number);
        inner.recorded(call, inner.spin_policy(false), |watch| step(&watch))
    })
}

/// Breaks the world, because this rank cannot perform a call.
pub(super) fn cannot(watch: &Watch, why: &str) -> Error {
    let Watch { rank, call, group_name, .. } = watch;
    let text = format!("rank {rank} cannot perform {call} of group {group_name}: {why}");
    watch.raise(None, Failure { culprit: *rank, cause: Cause::Failed, text })
}

/// Where NCCL writes a handle. It may do so after the call that asked for it has failed, so the memory is freed only
/// after a success.
pub(super) struct HandleSlot(pub *mut Handle);

impl HandleSlot {
    pub fn new() -> HandleSlot {
        HandleSlot(Box::into_raw(Box::new(std::ptr::null_mut())))
    }

    pub fn get(&self) -> Handle {
        // SAFETY: allocated by `new`, freed only by `free`.
        unsafe { self.0.read_volatile() }
    }

    pub fn free(self) {
        // SAFETY: allocated by `new`; NCCL is done with it.
        drop(unsafe { Box::from_raw(self.0) });
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
