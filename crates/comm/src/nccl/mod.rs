//! NCCL, loaded at run time: collectives on device memory between GPUs. Rendezvous, security, names, deadlines and the
//! flight recorder stay ours; the unique id of a communicator travels over the group's own connections.
//!
//! `api` declares the functions, `communicator` creates, splits and aborts communicators, `collectives` and `messages`
//! enqueue calls, `registry` registers the buffers of collectives, `connect` orders the creation of communicators for
//! messages, and `watcher` follows calls until the GPU has completed them: a dead, stuck or mismatched rank breaks the world
//! as it does for collectives on host memory, and then the communicator is aborted, which releases streams that wait for it.

pub(crate) mod api;
mod collectives;
mod communicator;
mod connect;
mod messages;
mod registry;
mod watcher;

pub(crate) use communicator::Communicator;
pub use connect::MessagePeers;

use crate::call::Algo;
use crate::call::error::Result;
use crate::call::topology::host_count;
use crate::device::{DeviceArgs, DeviceSlice};
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use crate::group::dispatch::dispatch;
use crate::group::messages::End;
use crate::health::watch::Watch;
use crate::lane::Lane;
use crate::link::{Rx, Tx};
use api::SUCCESS;
use communicator::{cannot, under_watch};
use lockstep_cuda::{Gpu, Stream};
use lockstep_types::Dtype;
use messages::Messages;
use registry::Registry;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use watcher::{Enqueued, Watcher};

pub(crate) struct Nccl {
    communicator: Arc<Communicator>,
    watcher: Watcher,
    messages: Messages,
    /// None if buffers are not registered.
    registry: Option<Registry>,
    gpu: Gpu,
    /// World ranks of the members.
    members: Arc<[usize]>,
    /// Our index among the members, and their number.
    place: (usize, usize),
    /// Calls that were compared, by their first words.
    seen: Mutex<HashSet<[u64; 2]>>,
}

impl Nccl {
    /// Opens the engine, `sharing` of whose members use one GPU at most. All members call it. Uses the communicator that
    /// was split for the group, if its parent had one, and otherwise creates it. `registers`: buffers of collectives are
    /// registered.
    pub(crate) fn open(group: &Group, gpu: &Gpu, sharing: usize, registers: bool) -> Result<Nccl> {
        let registry = registers.then(|| Registry::new(gpu.context.clone())).transpose();
        let registry = registry.map_err(|error| group.misuse(error.to_string()))?;
        let split = group.inner.communicator.lock().unwrap_or_else(|e| e.into_inner()).take();
        let communicator = match split {
            Some(communicator) => communicator,
            None => Communicator::open(group, gpu, sharing)?,
        };
        let communicator = Arc::new(communicator);
        Ok(Nccl {
            registry,
            messages: Messages::new(communicator.api, group, gpu, sharing),
            communicator,
            watcher: Watcher::start(),
            gpu: gpu.clone(),
            members: group.members().into(),
            place: (group.rank(), group.size()),
            seen: Mutex::default(),
        })
    }

    /// Splits the communicator of `group` for a new group with these members. All members of `group` call it. None on
    /// ranks that are not in the new group, and for groups of one.
    pub(crate) fn split(&self, group: &Group, members: &[usize]) -> Result<Option<Communicator>> {
        let key = members.iter().position(|member| *member == group.rank());
        let color = members.iter().min().filter(|_| members.len() > 1);
        under_watch(group, |watch| {
            // NCCL splits a communicator without calls in flight.
            self.watcher.flush();
            self.gpu.context.api();
            self.communicator.split((watch, &self.members), color.copied().zip(key))
        })
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
        let before = stream.record();
        let buffers = args.buffers().into_iter().chain(source);
        let found = self.registry.as_ref().map(|registry| registry.allocations(buffers));
        let allocations = found.transpose().map_err(|why| cannot(&watch, &why))?;
        self.communicator.enqueue((&watch, &self.members), |api, comm| {
            if let Some((registry, allocations)) = self.registry.as_ref().zip(allocations) {
                let status = registry.register_all(comm, &allocations);
                if status != SUCCESS {
                    return status;
                }
            }
            let target = collectives::target(api, comm, stream, dtype, self.place);
            target.enqueue(source, args)
        })?;
        self.watcher.follow(Enqueued {
            communicator: self.communicator.clone(),
            members: self.members.clone(),
            watch,
            events: [before, stream.record()],
        });
        Ok(())
    }

    /// Prepares messages between `peers`. All members call it, without messages in flight.
    pub(crate) fn connect(&self, group: &Group, peers: MessagePeers) -> Result<()> {
        self.gpu.context.api();
        self.messages.connect(group, peers)
    }

    /// Whether messages to and from a member are prepared.
    pub(crate) fn is_connected(&self, peer: usize) -> bool {
        self.messages.is_connected((self.place.0, peer))
    }

    /// Enqueues a send on a stream, and announces it to the receiver.
    pub(crate) fn send(
        &self,
        connection: (Watch, &mut End<Tx>),
        stream: &Stream,
        message: (DeviceSlice, usize),
    ) -> Result<()> {
        self.messages.send(connection, stream, message)
    }

    /// Enqueues a receive on a stream, after the sender has announced the message.
    pub(crate) fn receive(
        &self,
        connection: (Watch, &mut End<Rx>),
        stream: &Stream,
        message: (DeviceSlice, usize),
    ) -> Result<()> {
        self.messages.receive(connection, stream, message)
    }
}
