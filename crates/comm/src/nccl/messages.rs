//! Messages between two members, through a communicator per direction.
//!
//! NCCL runs the calls of one communicator one after the other, in the order in which the host enqueues them. Sends and
//! receives come from different threads, so on a communicator that they share, two ranks that send to each other would
//! each wait for a receive that is queued behind the send. A communicator from one member to another only contains the
//! messages in that direction, which both enqueue in the same order: nothing can be queued in front of the partner of a
//! call except earlier messages of the same direction.
//!
//! The communicators are created and used once before the first message, while no kernel waits for another rank: both
//! allocate device memory, and the driver may hold an allocation, and every launch of the process with it, until the
//! kernels that run have ended. For the same reason a rank that still allocates memory itself, as in its first step, does
//! not send messages through NCCL yet.

use super::api::{Api, UniqueId};
use super::collectives::{Target, target};
use super::communicator::{Communicator, Place, new_id, under_watch};
use super::connect::{Direction, MessagePeers, steps};
use super::watcher::{Enqueued, Watcher};
use crate::call::error::Result;
use crate::device::DeviceSlice;
use crate::group::Group;
use crate::group::messages::End;
use crate::health::watch::Watch;
use crate::link::{Rx, Tx};
use lockstep_cuda::{DeviceBuffer, Gpu, Stream};
use lockstep_types::Dtype;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// Blocks of a kernel that sends or receives. All messages of a rank that are in flight must fit on its GPU together with
/// a collective.
const MESSAGE_CTAS: usize = 4;

/// Members of the communicator of a direction.
const SENDER: usize = 0;
const RECEIVER: usize = 1;

/// Pause between two looks at the first message of a direction.
const PAUSE: Duration = Duration::from_micros(200);

pub(super) struct Messages {
    api: &'static Api,
    gpu: Gpu,
    me: usize,
    /// World ranks of the members.
    members: Arc<[usize]>,
    /// How many members use one GPU at most.
    sharing: usize,
    /// Follows messages apart from collectives, which must not wait for them. Before the communicators, so that its
    /// threads have ended when they are dropped.
    watcher: OnceLock<Watcher>,
    /// Ordered, so that all members end them in the same order.
    communicators: Mutex<BTreeMap<Direction, Arc<Communicator>>>,
}

impl Messages {
    /// Messages of a group, `sharing` of whose members use one GPU at most.
    pub fn new(api: &'static Api, group: &Group, gpu: &Gpu, sharing: usize) -> Messages {
        Messages {
            api,
            gpu: gpu.clone(),
            me: group.rank(),
            members: group.members().into(),
            sharing,
            watcher: OnceLock::new(),
            communicators: Mutex::default(),
        }
    }

    /// Creates the communicators of all directions between `peers`. All members call it, without messages in flight.
    pub fn connect(&self, group: &Group, peers: MessagePeers) -> Result<()> {
        let stream = Stream::new(self.gpu.context.clone());
        let byte = self.gpu.context.allocate(1, "the first messages of NCCL");
        let byte = byte.map_err(|error| group.misuse(error.to_string()))?;
        // All members have allocated their memory.
        group.barrier()?;
        // Members of one process that share a GPU also share the locks of the driver.
        for step in steps(self.members.len(), peers, self.sharing > 1) {
            let own = step.into_iter().find(|(from, to)| [*from, *to].contains(&self.me));
            // All members make the same calls, whether they have a direction in this step or not.
            let own = own.filter(|direction| self.find(*direction).is_none());
            let id = own.map(|direction| self.exchange_id(group, direction)).transpose()?;
            under_watch(group, |watch| match own.zip(id) {
                Some((direction, id)) => self.create(watch, (direction, id), &stream, &byte),
                None => Ok(()),
            })?;
            group.barrier()?;
        }
        drop(byte);
        // No member sends before all have freed their memory.
        group.barrier()
    }

    /// Whether messages can be sent in a direction.
    pub fn is_connected(&self, direction: Direction) -> bool {
        self.find(direction).is_some()
    }

    /// Passes a unique id from the sender of a direction to the receiver, over the group's own connection.
    fn exchange_id(&self, group: &Group, (from, to): Direction) -> Result<UniqueId> {
        let mut id = UniqueId::EMPTY;
        if self.me == from {
            id = new_id(self.api).map_err(|status| group.misuse(self.api.describe(status)))?;
            group.send(&id.0, to)?;
        } else {
            group.receive(&mut id.0, from)?;
        }
        Ok(id)
    }

    /// Creates the communicator of a direction together with the other member, and sends a byte through it.
    fn create(
        &self,
        watch: &Watch,
        (direction, id): (Direction, UniqueId),
        stream: &Stream,
        byte: &DeviceBuffer,
    ) -> Result<()> {
        let (from, to) = direction;
        let (me, peer) = if from == self.me { (SENDER, to) } else { (RECEIVER, from) };
        let place = Place { me, members: 2 };
        let max_ctas = Some(if self.sharing > 1 { 1 } else { MESSAGE_CTAS });
        let pair = (watch, &[self.members[from], self.members[to]][..]);
        let created = Communicator::create(self.api, pair, &self.gpu, (id, place), max_ctas)?;
        // SAFETY: the caller keeps the byte until the stream has completed the call.
        let byte = unsafe { DeviceSlice::new(byte.address, 1, Dtype::U8) };
        created.enqueue(pair, |api, comm| {
            transfer(&target(api, comm, stream, Dtype::U8, (me, 2)), byte)
        })?;
        let sent = stream.record();
        while !sent.is_complete() {
            watch.check(self.members[peer])?;
            std::thread::sleep(PAUSE);
        }
        self.lock().insert(direction, Arc::new(created));
        Ok(())
    }

    /// Enqueues a send. The receiver compares the call with its own before it enqueues the receive.
    pub fn send(
        &self,
        (watch, end): (Watch, &mut End<Tx>),
        stream: &Stream,
        (message, to): (DeviceSlice, usize),
    ) -> Result<()> {
        end.send(&watch, &[])?;
        self.enqueue(watch, stream, message, (self.me, to))
    }

    /// Enqueues a receive.
    pub fn receive(
        &self,
        (watch, end): (Watch, &mut End<Rx>),
        stream: &Stream,
        (message, from): (DeviceSlice, usize),
    ) -> Result<()> {
        end.receive(&watch, &mut [])?;
        self.enqueue(watch, stream, message, (from, self.me))
    }

    fn enqueue(
        &self,
        watch: Watch,
        stream: &Stream,
        message: DeviceSlice,
        direction: Direction,
    ) -> Result<()> {
        let communicator = self.find(direction).expect("the caller has checked the connection");
        let me = if direction.0 == self.me { SENDER } else { RECEIVER };
        let members: Arc<[usize]> = [direction.0, direction.1].map(|one| self.members[one]).into();
        let before = stream.record();
        communicator.enqueue((&watch, &members), |api, comm| {
            transfer(&target(api, comm, stream, message.dtype(), (me, 2)), message)
        })?;
        let events = [before, stream.record()];
        let call = Enqueued { communicator, members, watch, events };
        self.watcher.get_or_init(Watcher::start).follow(call);
        Ok(())
    }

    fn find(&self, direction: Direction) -> Option<Arc<Communicator>> {
        self.lock().get(&direction).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Direction, Arc<Communicator>>> {
        self.communicators.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Enqueues our side of a message.
fn transfer(target: &Target<'_>, message: DeviceSlice) -> c_int {
    match target.me {
        SENDER => target.send(message.address(), message.len(), RECEIVER),
        _ => target.receive(message.address(), message.len(), SENDER),
    }
}
