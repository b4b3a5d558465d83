//! NCCL, loaded at run time: collectives on device memory between GPUs. Rendezvous, security, names, deadlines and the
//! flight recorder stay ours; the unique id of a communicator travels over the group's own connections.
//!
//! `api` declares the functions, `communicator` creates and aborts communicators, `collectives` enqueues calls, and
//! `watcher` follows them until the GPU has completed them: a dead, stuck or mismatched rank breaks the world as it does
//! for collectives on host memory, and then the communicator is aborted, which releases streams that wait for it.

pub(crate) mod api;
mod collectives;
mod communicator;
mod watcher;

use crate::call::error::Result;
use crate::device::{DeviceArgs, DeviceSlice};
use crate::group::Group;
use crate::health::watch::Watch;
use communicator::Communicator;
use lockstep_cuda::{Gpu, Stream};
use lockstep_types::Dtype;
use std::sync::Arc;
use watcher::Watcher;

pub(crate) struct Nccl {
    communicator: Arc<Communicator>,
    watcher: Watcher,
    /// Our index among the members, and their number.
    place: (usize, usize),
}

impl Nccl {
    /// Creates a communicator of all members, `sharing` of which use one GPU at most. All members call it.
    pub(crate) fn open(group: &Group, gpu: &Gpu, sharing: usize) -> Result<Nccl> {
        let communicator = Arc::new(Communicator::open(group, gpu, sharing)?);
        let watcher = Watcher::start(communicator.clone(), group.members().into());
        Ok(Nccl { communicator, watcher, place: (group.rank(), group.size()) })
    }

    /// Enqueues a collective on a stream. `source` is the input of a collective that has one buffer on the host.
    pub(crate) fn perform(
        &self,
        watch: Watch,
        stream: &Stream,
        dtype: Dtype,
        source: Option<DeviceSlice>,
        args: &DeviceArgs<'_>,
    ) -> Result<()> {
        self.communicator.enqueue(&watch, |api, comm| {
            let target = collectives::target(api, comm, stream, dtype, self.place);
            target.enqueue(source, args)
        })?;
        self.watcher.follow(watch, stream.record());
        Ok(())
    }
}
