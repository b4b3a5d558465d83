//! Messages between two members, through a communicator per direction.
//!
//! NCCL runs the calls of one communicator one after the other, in the order in which the host enqueues them. Sends and
//! receives come from different threads, so on a communicator that they share, two ranks that send to each other would
//! each wait for a receive that is queued behind the send. A communicator from one member to another only contains the
//! messages in that direction, which both enqueue in the same order: nothing can be queued in front of the partner of a
//! call except earlier messages of the same direction. It is created by the first message, whose sender passes the
//! unique id over the group's own connection.

use super::api::UniqueId;
use super::collectives::target;
use super::communicator::{Communicator, Place, new_id};
use super::watcher::{Enqueued, Watcher};
use crate::call::error::Result;
use crate::device::DeviceSlice;
use crate::group::Group;
use crate::group::messages::End;
use crate::health::watch::Watch;
use crate::link::{Rx, Tx};
use lockstep_cuda::{Gpu, Stream};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Blocks of a kernel that sends or receives. All messages of a rank that are in flight must fit on its GPU together with
/// a collective.
const MESSAGE_CTAS: usize = 4;

/// Members of the communicator of a direction.
const SENDER: usize = 0;
const RECEIVER: usize = 1;

pub(super) struct Messages {
    /// The communicator of all members.
    all: Arc<Communicator>,
    gpu: Gpu,
    me: usize,
    /// World ranks of the members.
    members: Arc<[usize]>,
    max_ctas: usize,
    /// Follows messages apart from collectives, which must not wait for them. Before the communicators, so that its
    /// thread has ended when they are dropped.
    watcher: OnceLock<Watcher>,
    /// By sender and receiver. Ordered, so that all members end them in the same order.
    communicators: Mutex<BTreeMap<(usize, usize), Arc<Communicator>>>,
}

impl Messages {
    /// Messages of a group, `sharing` of whose members use one GPU at most.
    pub fn new(all: Arc<Communicator>, group: &Group, gpu: &Gpu, sharing: usize) -> Messages {
        Messages {
            all,
            gpu: gpu.clone(),
            me: group.rank(),
            members: group.members().into(),
            max_ctas: if sharing > 1 { 1 } else { MESSAGE_CTAS },
            watcher: OnceLock::new(),
            communicators: Mutex::default(),
        }
    }

    /// Enqueues a send. The receiver compares the call with its own before it enqueues the receive.
    pub fn send(
        &self,
        (watch, end): (Watch, &mut End<Tx>),
        stream: &Stream,
        (message, to): (DeviceSlice, usize),
    ) -> Result<()> {
        let pair = (self.me, to);
        let communicator = match self.find(pair) {
            Some(communicator) => {
                end.send(&watch, &[])?;
                communicator
            }
            None => {
                let id = new_id(self.all.api).map_err(|status| self.all.failed(&watch, status))?;
                end.send(&watch, &id.0)?;
                self.create(&watch, id, pair)?
            }
        };
        communicator.enqueue(&watch, |api, comm| {
            let target = target(api, comm, stream, message.dtype(), (SENDER, 2));
            target.send(message.address(), message.len(), RECEIVER)
        })?;
        self.follow(communicator, watch, stream, to);
        Ok(())
    }

    /// Enqueues a receive.
    pub fn receive(
        &self,
        (watch, end): (Watch, &mut End<Rx>),
        stream: &Stream,
        (message, from): (DeviceSlice, usize),
    ) -> Result<()> {
        let pair = (from, self.me);
        let communicator = match self.find(pair) {
            Some(communicator) => {
                end.receive(&watch, &mut [])?;
                communicator
            }
            None => {
                let mut id = UniqueId::EMPTY;
                end.receive(&watch, &mut id.0)?;
                self.create(&watch, id, pair)?
            }
        };
        communicator.enqueue(&watch, |api, comm| {
            let target = target(api, comm, stream, message.dtype(), (RECEIVER, 2));
            target.receive(message.address(), message.len(), SENDER)
        })?;
        self.follow(communicator, watch, stream, from);
        Ok(())
    }

    fn find(&self, pair: (usize, usize)) -> Option<Arc<Communicator>> {
        self.lock().get(&pair).cloned()
    }

    /// Creates the communicator of a direction together with the other member. Only the track of this direction asks for
    /// it, so nobody else creates it at the same time.
    fn create(
        &self,
        watch: &Watch,
        id: UniqueId,
        pair: (usize, usize),
    ) -> Result<Arc<Communicator>> {
        let place = Place { me: if pair.0 == self.me { SENDER } else { RECEIVER }, members: 2 };
        let max_ctas = Some(self.max_ctas);
        let created = Communicator::create(self.all.api, watch, &self.gpu, (id, place), max_ctas);
        let created = Arc::new(created?);
        self.lock().insert(pair, created.clone());
        Ok(created)
    }

    fn follow(&self, communicator: Arc<Communicator>, watch: Watch, stream: &Stream, peer: usize) {
        let members = [self.me, peer].map(|member| self.members[member]).into();
        let call = Enqueued { communicator, members, watch, event: stream.record() };
        self.watcher.get_or_init(Watcher::start).follow(call);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(usize, usize), Arc<Communicator>>> {
        self.communicators.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
