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

use crate::call::Algo;
use crate::call::error::Result;
use crate::call::topology::host_count;
use crate::device::{DeviceArgs, DeviceSlice};
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use crate::group::dispatch::dispatch;
use crate::health::watch::Watch;
use crate::lane::Lane;
use communicator::Communicator;
use lockstep_cuda::{Gpu, Stream};
use lockstep_types::Dtype;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use watcher::Watcher;

pub(crate) struct Nccl {
    communicator: Arc<Communicator>,
    watcher: Watcher,
    /// Our index among the members, and their number.
    place: (usize, usize),
    /// Calls that were compared, by their first words.
    seen: Mutex<HashSet<[u64; 2]>>,
}

impl Nccl {
    /// Creates a communicator of all members, `sharing` of which use one GPU at most. All members call it.
    pub(crate) fn open(group: &Group, gpu: &Gpu, sharing: usize) -> Result<Nccl> {
        let communicator = Arc::new(Communicator::open(group, gpu, sharing)?);
        let watcher = Watcher::start(communicator.clone(), group.members().into());
        let place = (group.rank(), group.size());
        Ok(Nccl { communicator, watcher, place, seen: Mutex::default() })
    }

    /// Compares a call with those of the other members before it is enqueued, if it is the first of its kind and length:
    /// NCCL would mix up buffers of different lengths without noticing. Later calls are compared by their history, and on
    /// the board while they wait. Returns the watch.
    pub(crate) fn compare(&self, lane: &mut Lane, watch: Watch) -> Result<Watch> {
        let [head, count, ..] = watch.call.words();
        let is_new = self.seen.lock().unwrap_or_else(|e| e.into_inner()).insert([head, count]);
        let algo = if host_count(&lane.hosts) == 1 { Algo::Direct } else { Algo::Halving };
        lane.begin(watch);
        let compared = match is_new {
            true => dispatch(lane, CollectiveArgs::Barrier, algo, Dtype::U8),
            false => Ok(()),
        };
        let watch = lane.hand_over().expect("begun above");
        compared.map(|()| watch)
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
