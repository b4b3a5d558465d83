//! A group: an ordered subset of a world's ranks that call collectives together.
//!
//! All members make the same calls in the same order. Calls of one group are executed one after the
//! other; different groups are independent and may be used from different threads at the same time.
//! Every call has a `start_…` form that takes ownership of its buffers, runs in the background and
//! returns them from `wait`.

pub(crate) mod args;
pub(crate) mod backend;
mod collectives;
pub(crate) mod dispatch;
mod execute;
pub(crate) mod messages;
pub(crate) mod split;
pub(crate) mod started;
pub(crate) mod track;

use crate::algo::choose::LinkCosts;
use crate::call::Algo;
use crate::call::topology::{local_members, number_hosts};
use crate::call::traffic::Traffic;
use crate::group::backend::Backend;
use crate::group::messages::{MessageParts, Messages};
use crate::group::track::Track;
use crate::lane::{Lane, LaneParts};
use crate::memory::arena::Arena;
use crate::memory::symmetric::Registry;
use crate::world::context::Context;
use lockstep_types::Collective;
use lockstep_types::trace::Tracer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Id of the group of all ranks; the ids of all other groups are derived from it.
const WORLD_ID: u64 = 1;

/// Ranks that call collectives together. Cheap to clone; clones are the same group.
#[derive(Clone)]
pub struct Group {
    pub(crate) inner: Arc<Inner>,
    forced: Option<Algo>,
}

pub(crate) struct Inner {
    pub context: Arc<Context>,
    pub id: u64,
    pub name: Arc<str>,
    /// World ranks of the members.
    pub members: Arc<[usize]>,
    pub me: usize,
    pub hosts: Arc<[usize]>,
    pub track: Arc<Track<Backend>>,
    /// Whether an external engine, which is MPI, performs the calls (see `backend`).
    pub engine: bool,
    pub messages: Messages,
    pub registry: Arc<Registry>,
    /// Collectives on device memory, once they are opened.
    pub device: OnceLock<Arc<crate::device::State>>,
    /// Split from that of the parent, until the group is opened on device memory.
    pub communicator: Mutex<Option<crate::nccl::Communicator>>,
    pub allocations: AtomicU32,
    sent_messages: AtomicU64,
    sent_bytes: AtomicU64,
    /// Cached choices of algorithms.
    choices: Mutex<HashMap<(Collective, usize, usize, usize), Algo>>,
}

/// Identity of a new group on this rank.
pub(crate) struct GroupSpec {
    pub context: Arc<Context>,
    pub id: u64,
    pub name: Arc<str>,
    /// World ranks of the members.
    pub members: Arc<[usize]>,
}

impl GroupSpec {
    /// The group of all ranks.
    pub(crate) fn world(context: Arc<Context>) -> GroupSpec {
        let members = (0..context.hosts.len()).collect();
        GroupSpec { context, id: WORLD_ID, name: "world".into(), members }
    }

    /// Our index among the members.
    pub(crate) fn me(&self) -> usize {
        let rank = self.context.rank;
        self.members.iter().position(|r| *r == rank).expect("we are a member")
    }

    /// Host of each member.
    pub(crate) fn hosts(&self) -> Arc<[usize]> {
        number_hosts(self.members.iter().map(|r| self.context.hosts[*r])).into()
    }
}

impl Group {
    /// Creates a group over our own links; `arena` is its shared memory on this host.
    pub(crate) fn over_links(spec: GroupSpec, arena: &Arena) -> Group {
        let (me, hosts) = (spec.me(), spec.hosts());
        let registry = Arc::new(Registry::default());
        let locals = local_members(&hosts, hosts[me]);
        let local_indices: Vec<Option<usize>> =
            (0..spec.members.len()).map(|m| locals.iter().position(|l| *l == m)).collect();
        let messages = Messages::over_links(&MessageParts {
            group: spec.id,
            me,
            members: &spec.members,
            local_indices: &local_indices,
            arena,
            sockets: spec.context.sockets.as_ref(),
        });
        let lane = Lane::new(LaneParts {
            group: spec.id,
            me,
            members: spec.members.clone(),
            hosts,
            arena: arena.clone(),
            sockets: spec.context.sockets.clone(),
            registry: registry.clone(),
            access: spec.context.access.clone(),
        });
        Group::new(spec, Backend::Lane(Box::new(lane)), messages, registry)
    }

    pub(crate) fn new(
        spec: GroupSpec,
        backend: Backend,
        messages: Messages,
        registry: Arc<Registry>,
    ) -> Group {
        let (me, hosts) = (spec.me(), spec.hosts());
        let inner = Inner {
            context: spec.context,
            id: spec.id,
            name: spec.name,
            members: spec.members,
            me,
            hosts,
            engine: backend.is_engine(),
            track: Arc::new(Track::new(backend)),
            messages,
            registry,
            device: OnceLock::new(),
            communicator: Mutex::default(),
            allocations: AtomicU32::new(0),
            sent_messages: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            choices: Mutex::default(),
        };
        Group { inner: Arc::new(inner), forced: None }
    }

    /// Our index among the members.
    pub fn rank(&self) -> usize {
        self.inner.me
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.inner.members.len()
    }

    /// World ranks of the members, in order.
    pub fn members(&self) -> &[usize] {
        &self.inner.members
    }

    /// Host of each member, numbered from 0 in order of first appearance.
    pub fn hosts(&self) -> &[usize] {
        &self.inner.hosts
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How long a call waits for the other members before it fails.
    pub fn timeout(&self) -> Duration {
        self.inner.context.timeout
    }

    /// The same group with a fixed algorithm; `None` returns to automatic choice. All members must fix
    /// the same algorithm.
    pub fn with_algo(&self, algo: Option<Algo>) -> Group {
        Group { inner: self.inner.clone(), forced: algo }
    }

    /// Traffic that this member has sent in this group so far, in collectives and point-to-point
    /// messages. Zero if an external engine (MPI) performs the calls, because it does not report traffic.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            messages: self.inner.sent_messages.load(Ordering::Relaxed),
            bytes: self.inner.sent_bytes.load(Ordering::Relaxed),
        }
    }

    /// Whether MPI performs the calls.
    pub fn is_over_mpi(&self) -> bool {
        self.inner.engine
    }

    /// Whether members of one host copy from each other's memory through the kernel where it pays.
    pub fn uses_cross_memory(&self) -> bool {
        self.inner.context.access.cross_memory.load(Ordering::Relaxed)
    }

    /// Unmaps the pages of other processes' memory that in-place calls have touched. The data stays in
    /// place and is mapped again on the next access; until then the pages count only as their owners'
    /// memory. Worth its cost after large buffers that are not used again soon.
    pub fn release_peer_pages(&self) {
        if let Some(heaps) = self.inner.context.access.heaps.get() {
            heaps.release_pages();
        }
    }

    /// Recorder of this rank's spans, shared by all groups of its world.
    pub fn tracer(&self) -> &Tracer {
        &self.inner.context.tracer
    }

    /// Link costs by which algorithms are chosen.
    pub fn link_costs(&self) -> LinkCosts {
        self.inner.context.link_costs()
    }
}

impl Inner {
    fn count(&self, sent: Traffic) {
        self.sent_messages.fetch_add(sent.messages, Ordering::Relaxed);
        self.sent_bytes.fetch_add(sent.bytes, Ordering::Relaxed);
    }

    /// Counts a message to a member, unless an engine sent it: engines are not counted at all.
    pub(crate) fn count_message(&self, bytes: usize) {
        if !self.engine {
            self.count(Traffic { messages: 1, bytes: bytes as u64 });
        }
    }
}
