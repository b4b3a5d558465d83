//! A group's private way of moving bytes: one collective at a time, in order, over whatever links
//! its members. The algorithms know only this. Counts what is sent.

use crate::call::cost::Traffic;
use crate::call::error::Result;
use crate::health::past::Past;
use crate::health::watch::Watch;
use crate::link::socket::SocketReader;
use crate::link::sockets::{LaneKind, Sockets};
use crate::link::{BellRef, Inbox, Incoming, Outgoing, Rx, Tx, transfer};
use crate::memory::arena::Arena;
use crate::memory::heap::{self, Heaps};
use crate::memory::scratch::Scratch;
use crate::memory::stage::{Stages, Window};
use crate::memory::symmetric::Registry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Stands for the shared heaps where a window names a symmetric allocation.
const HEAP: u32 = u32::MAX;

pub(crate) struct Lane {
    /// Our index among the members.
    pub me: usize,
    /// World ranks of the members.
    pub members: Arc<[usize]>,
    /// Which host each member is on, numbered from 0 in order of appearance.
    pub hosts: Arc<[usize]>,
    /// The members of our host, by seat; members are listed in their order.
    pub locals: Vec<usize>,
    pub stages: Stages,
    pub traffic: Traffic,
    /// Passing use within a call; kept from one to the next.
    pub scratch: Scratch,
    /// The call under way.
    watch: Option<Watch>,
    /// The calls before it.
    past: Past,
    group: u64,
    arena: Arena,
    tx: Vec<Option<Tx>>,
    rx: Vec<Option<Rx>>,
    sockets: Option<Arc<Sockets>>,
    registry: Arc<Registry>,
    direct_access: Arc<AtomicBool>,
    may_pull: Arc<AtomicBool>,
    heaps: Arc<OnceLock<Heaps>>,
}

/// What a lane is made of.
pub(crate) struct LaneParts {
    pub group: u64,
    pub me: usize,
    pub members: Arc<[usize]>,
    pub hosts: Arc<[usize]>,
    pub arena: Arena,
    pub sockets: Option<Arc<Sockets>>,
    pub registry: Arc<Registry>,
    pub direct_access: Arc<AtomicBool>,
    pub may_pull: Arc<AtomicBool>,
    pub heaps: Arc<OnceLock<Heaps>>,
}

impl Lane {
    pub(crate) fn new(parts: LaneParts) -> Lane {
        let LaneParts {
            group,
            me,
            members,
            hosts,
            arena,
            sockets,
            registry,
            direct_access,
            may_pull,
            heaps,
        } = parts;
        let locals = locals_of(&hosts, hosts[me]);
        let seat = locals.iter().position(|&m| m == me).expect("we are on our own host");
        let ranks = locals.iter().map(|&m| members[m]).collect();
        let stages = Stages::new(arena.clone(), seat, ranks);
        let mut tx: Vec<Option<Tx>> = members.iter().map(|_| None).collect();
        let mut rx: Vec<Option<Rx>> = members.iter().map(|_| None).collect();
        for (peer_seat, &peer) in locals.iter().enumerate() {
            // SAFETY: the lane keeps the arena, and with it the bell, for as long as its links.
            let bell = unsafe { BellRef::new(&arena.seat(peer_seat).bell) };
            tx[peer] = Some(Tx::Shared { writer: arena.writer(seat, peer_seat), bell });
            rx[peer] = Some(Rx::Shared { reader: arena.reader(peer_seat, seat), bell });
        }
        Lane {
            me,
            members,
            hosts,
            locals,
            stages,
            traffic: Traffic::default(),
            scratch: Scratch::new(0),
            watch: None,
            past: Past::default(),
            group,
            arena,
            tx,
            rx,
            sockets,
            registry,
            direct_access,
            may_pull,
            heaps,
        }
    }

    /// Takes up a call; everything until `end` is done in its name.
    pub(crate) fn begin(&mut self, mut watch: Watch) {
        watch.past = self.past;
        self.watch = Some(watch);
    }

    pub(crate) fn end(&mut self) {
        if let Some(watch) = self.watch.take() {
            self.past = self.past.then(&watch.call);
        }
    }

    pub(crate) fn watch(&self) -> &Watch {
        self.watch.as_ref().expect("a call is under way")
    }

    /// The stages and the watch at once, for use side by side.
    pub(crate) fn stages(&mut self) -> (&mut Stages, &Watch) {
        (&mut self.stages, self.watch.as_ref().expect("a call is under way"))
    }

    /// The window through which peers may reach `len` bytes at `data`.
    pub(crate) fn window(&self, data: *const u8, len: usize) -> Window {
        let heap = || heap::offset_of(data).map(|offset| (HEAP, offset as u64));
        let (symmetric, offset) = self.registry.find(data, len).or_else(heap).unwrap_or((0, 0));
        let at = data.expose_provenance() as u64;
        Window { pid: std::process::id(), symmetric, at, offset }
    }

    /// Whether every member of this host may read every other's memory.
    pub(crate) fn may_pull(&self) -> bool {
        self.may_pull.load(Ordering::Relaxed)
    }

    /// The addresses of all local members' windows, if every one of them can be reached in place
    /// from every other. All members come to the same answer, since they look at the same postings.
    pub(crate) fn reachable(&self) -> Option<Vec<*mut u8>> {
        if !self.direct_access.load(Ordering::Relaxed) {
            return None;
        }
        let windows: Vec<Window> =
            (0..self.stages.members()).map(|m| self.stages.window(m)).collect();
        let first = windows[0];
        let of_one_kind = windows.iter().all(|w| w.symmetric == first.symmetric);
        let address = |w: &Window| std::ptr::with_exposed_provenance_mut(w.at as usize);
        if windows.iter().all(|w| w.pid == first.pid) {
            return Some(windows.iter().map(address).collect());
        }
        match first.symmetric {
            0 => None,
            _ if !of_one_kind => None,
            HEAP => {
                let heaps = self.heaps.get()?;
                let at = |seat: usize, w: &Window| match seat == self.stages.me {
                    true => Some(address(w)),
                    false => heaps.at(self.stages.ranks[seat], w.offset),
                };
                windows.iter().enumerate().map(|(seat, w)| at(seat, w)).collect()
            }
            id => self.registry.resolve(id, windows.iter().map(|w| w.offset)),
        }
    }

    /// Sends a message and receives another at the same time, whichever are given.
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
        let watch = self.watch.as_ref().expect("a call is under way");
        let bell = &self.arena.seat(self.stages.me).bell;
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

    pub(crate) fn send(&mut self, to: usize, bytes: &[u8]) -> Result<()> {
        self.step(Some((to, bytes)), None)
    }

    pub(crate) fn receive(&mut self, from: usize, bytes: &mut [u8]) -> Result<()> {
        self.step(None, Some((from, Inbox::Into(bytes))))
    }

    fn open_tx(&mut self, to: usize) -> Result<()> {
        if self.tx[to].is_none() {
            let sockets = self.sockets.as_ref().expect("only remote members lack a link");
            let stream =
                sockets.dial(self.members[to], self.group, LaneKind::Collective, self.watch())?;
            self.tx[to] = Some(Tx::Socket(stream));
        }
        Ok(())
    }

    fn open_rx(&mut self, from: usize) -> Result<()> {
        if self.rx[from].is_none() {
            let sockets = self.sockets.as_ref().expect("only remote members lack a link");
            let rank = self.members[from];
            let stream = sockets.arrival(rank, self.group, LaneKind::Collective, self.watch())?;
            self.rx[from] = Some(Rx::Socket(SocketReader::new(stream)));
        }
        Ok(())
    }
}

/// The members on a host, in their order.
pub(crate) fn locals_of(hosts: &[usize], host: usize) -> Vec<usize> {
    (0..hosts.len()).filter(|&m| hosts[m] == host).collect()
}
