//! Data path of one group: one collective at a time, in order, over shared memory and sockets. The
//! algorithms use only this. Counts the traffic that is sent.

pub(crate) mod slots;

use crate::call::error::Result;
use crate::call::history::CallHistory;
use crate::call::topology::local_members;
use crate::call::traffic::Traffic;
use crate::health::watch::Watch;
use crate::link::socket::SocketReader;
use crate::link::sockets::{LaneKind, Sockets};
use crate::link::{BellRef, Inbox, Incoming, Outgoing, Rx, Tx, transfer};
use crate::memory::arena::Arena;
use crate::memory::heap::{self, PeerHeaps};
use crate::memory::member::BufferLocation;
use crate::memory::scratch::Scratch;
use crate::memory::symmetric::Registry;
use slots::Slots;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Allocation id that stands for the shared heap.
const HEAP: u32 = u32::MAX;

pub(crate) struct Lane {
    /// Our index among the members.
    pub me: usize,
    /// World ranks of the members.
    pub members: Arc<[usize]>,
    /// Host of each member, numbered from 0 in order of first appearance.
    pub hosts: Arc<[usize]>,
    /// The members on our host, in group order.
    pub locals: Vec<usize>,
    pub slots: Slots,
    pub traffic: Traffic,
    /// Temporary memory of a call, reused by the next.
    pub scratch: Scratch,
    /// The call in progress.
    watch: Option<Watch>,
    /// The calls before it.
    history: CallHistory,
    group: u64,
    arena: Arena,
    tx: Vec<Option<Tx>>,
    rx: Vec<Option<Rx>>,
    sockets: Option<Arc<Sockets>>,
    registry: Arc<Registry>,
    access: LocalAccess,
}

/// How the ranks of a host may access each other's buffers. Determined when the world starts.
#[derive(Clone, Default)]
pub(crate) struct LocalAccess {
    /// Whether buffers may be accessed at all; otherwise data passes through slots.
    pub direct: Arc<AtomicBool>,
    /// Whether every rank of a host may copy from and to every other's memory (process_vm_readv).
    pub cross_memory: Arc<AtomicBool>,
    /// The heaps of this host's ranks, if all ranks can map all of them.
    pub heaps: Arc<OnceLock<PeerHeaps>>,
}

pub(crate) struct LaneParts {
    pub group: u64,
    pub me: usize,
    pub members: Arc<[usize]>,
    pub hosts: Arc<[usize]>,
    pub arena: Arena,
    pub sockets: Option<Arc<Sockets>>,
    pub registry: Arc<Registry>,
    pub access: LocalAccess,
}

impl Lane {
    pub(crate) fn new(parts: LaneParts) -> Lane {
        let LaneParts { group, me, members, hosts, arena, sockets, registry, access } = parts;
        let locals = local_members(&hosts, hosts[me]);
        let local_index = locals.iter().position(|&m| m == me).expect("we are on our own host");
        let ranks = locals.iter().map(|&m| members[m]).collect();
        let slots = Slots::new(arena.clone(), local_index, ranks);
        let mut tx: Vec<Option<Tx>> = members.iter().map(|_| None).collect();
        let mut rx: Vec<Option<Rx>> = members.iter().map(|_| None).collect();
        for (i, &peer) in locals.iter().enumerate() {
            // SAFETY: the lane keeps the arena, and with it the bell, for as long as its links.
            let bell = unsafe { BellRef::new(&arena.member(i).bell) };
            tx[peer] = Some(Tx::Shared { writer: arena.writer(local_index, i), bell });
            rx[peer] = Some(Rx::Shared { reader: arena.reader(i, local_index), bell });
        }
        Lane {
            me,
            members,
            hosts,
            locals,
            slots,
            traffic: Traffic::default(),
            scratch: Scratch::new(0),
            watch: None,
            history: CallHistory::default(),
            group,
            arena,
            tx,
            rx,
            sockets,
            registry,
            access,
        }
    }

    /// Begins a call; everything until `end` belongs to it.
    pub(crate) fn begin(&mut self, mut watch: Watch) {
        watch.history = self.history;
        self.watch = Some(watch);
    }

    pub(crate) fn end(&mut self) {
        drop(self.hand_over());
    }

    /// Ends a call on the lane that goes on elsewhere, and returns its watch.
    pub(crate) fn hand_over(&mut self) -> Option<Watch> {
        let watch = self.watch.take()?;
        self.history = self.history.then(&watch.call);
        Some(watch)
    }

    pub(crate) fn watch(&self) -> &Watch {
        self.watch.as_ref().expect("a call is in progress")
    }

    /// Borrows the slots and the watch at the same time.
    pub(crate) fn slots(&mut self) -> (&mut Slots, &Watch) {
        (&mut self.slots, self.watch.as_ref().expect("a call is in progress"))
    }

    /// Location at which peers may access `len` bytes at `data`.
    pub(crate) fn locate(&self, data: *const u8, len: usize) -> BufferLocation {
        let heap = || heap::offset_of(data).map(|offset| (HEAP, offset as u64));
        let (allocation, offset) = self.registry.find(data, len).or_else(heap).unwrap_or((0, 0));
        let address = data.expose_provenance() as u64;
        BufferLocation { pid: std::process::id(), allocation, address, offset }
    }

    /// Whether every member of this host may copy from and to every other's memory.
    pub(crate) fn has_cross_memory(&self) -> bool {
        self.access.cross_memory.load(Ordering::Relaxed)
    }

    /// Addresses of all local members' announced buffers, if every member can access every one of them
    /// in place. All members get the same answer, since they look at the same postings.
    pub(crate) fn mapped_buffers(&self) -> Option<Vec<*mut u8>> {
        if !self.access.direct.load(Ordering::Relaxed) {
            return None;
        }
        let locations: Vec<BufferLocation> =
            (0..self.slots.members()).map(|m| self.slots.location(m)).collect();
        let first = locations[0];
        let address =
            |l: &BufferLocation| std::ptr::with_exposed_provenance_mut(l.address as usize);
        if locations.iter().all(|l| l.pid == first.pid) {
            return Some(locations.iter().map(address).collect());
        }
        if first.allocation == 0 || locations.iter().any(|l| l.allocation != first.allocation) {
            return None;
        }
        if first.allocation != HEAP {
            return self.registry.resolve(first.allocation, locations.iter().map(|l| l.offset));
        }
        let heaps = self.access.heaps.get()?;
        let mapped = |(i, location): (usize, &BufferLocation)| match i == self.slots.me {
            true => Some(address(location)),
            false => heaps.at(self.slots.ranks[i], location.offset),
        };
        locations.iter().enumerate().map(mapped).collect()
    }

    /// Sends one message and receives another at the same time; either may be absent.
    pub(crate) fn step(
        &mut self,
        out: Option<(usize, &[u8])>,
        inc: Option<(usize, Inbox<'_>)>,
    ) -> Result<()> {
        if let Some((to, bytes)) = out {
            self.open_tx(to)?;
            self.traffic.messages += 1;
            self.traffic.bytes += bytes.len() as u64;
        }
        if let Some((from, _)) = inc {
            self.open_rx(from)?;
        }
        let watch = self.watch.as_ref().expect("a call is in progress");
        let bell = &self.arena.member(self.slots.me).bell;
        let out = out.map(|(to, bytes)| {
            let tx = self.tx[to].as_mut().expect("opened above");
            Outgoing::new(self.members[to], tx, watch, bytes)
        });
        let inc = inc.map(|(from, inbox)| {
            let rx = self.rx[from].as_mut().expect("opened above");
            Incoming::new(self.members[from], rx, inbox)
        });
        transfer(watch, bell, out, inc)
    }

    fn open_tx(&mut self, to: usize) -> Result<()> {
        if self.tx[to].is_none() {
            let sockets = self.sockets.as_ref().expect("only remote members lack a link");
            let stream =
                sockets.dial(self.members[to], self.group, LaneKind::Collective, self.watch())?;
            self.tx[to] = Some(Tx::Socket(stream.writer));
        }
        Ok(())
    }

    fn open_rx(&mut self, from: usize) -> Result<()> {
        if self.rx[from].is_none() {
            let sockets = self.sockets.as_ref().expect("only remote members lack a link");
            let rank = self.members[from];
            let stream = sockets.accept(rank, self.group, LaneKind::Collective, self.watch())?;
            self.rx[from] = Some(Rx::Socket(SocketReader::new(stream)));
        }
        Ok(())
    }
}
