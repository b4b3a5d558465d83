//! Fences between members: in one process they are shared, between processes they are opened by name.

use super::super::choice::MemberFacts;
use crate::call::error::Result;
use crate::group::Group;
use lockstep_cuda::{CudaError, Fence, Gpu};
use std::sync::Arc;

/// Fences that one member records.
pub(super) struct OwnFences {
    /// Its buffers of a collective may be used.
    pub ready: Fence,
    /// The work of a collective is complete; recorded by the leader.
    pub done: Fence,
    /// By receiver: a message may be read.
    pub sent: Vec<Fence>,
    /// By sender: a message was read.
    pub taken: Vec<Fence>,
}

/// Fences of another member that this one waits for.
pub(super) enum PeerFences {
    /// A thread of this process.
    Thread(Arc<OwnFences>),
    /// Another process. `sent` and `taken` are those between it and us.
    Process { ready: Fence, done: Fence, sent: Fence, taken: Fence },
}

impl PeerFences {
    pub fn ready(&self) -> &Fence {
        match self {
            PeerFences::Thread(fences) => &fences.ready,
            PeerFences::Process { ready, .. } => ready,
        }
    }

    pub fn done(&self) -> &Fence {
        match self {
            PeerFences::Thread(fences) => &fences.done,
            PeerFences::Process { done, .. } => done,
        }
    }

    /// Recorded when a message to member `me` may be read.
    pub fn sent(&self, me: usize) -> &Fence {
        match self {
            PeerFences::Thread(fences) => &fences.sent[me],
            PeerFences::Process { sent, .. } => sent,
        }
    }

    /// Recorded when a message from member `me` was read.
    pub fn taken(&self, me: usize) -> &Fence {
        match self {
            PeerFences::Thread(fences) => &fences.taken[me],
            PeerFences::Process { taken, .. } => taken,
        }
    }
}

impl OwnFences {
    fn new(
        gpu: &Gpu,
        members: usize,
        processes: bool,
    ) -> std::result::Result<OwnFences, CudaError> {
        let fence = || match processes {
            true => Fence::interprocess(&gpu.context),
            false => Fence::new(&gpu.context),
        };
        let fences = || (0..members).map(|_| fence()).collect::<std::result::Result<Vec<_>, _>>();
        Ok(OwnFences { ready: fence()?, done: fence()?, sent: fences()?, taken: fences()? })
    }

    /// Names of all fences: ready, done, sent and taken by member.
    fn names(&self) -> std::result::Result<Vec<[u8; 64]>, CudaError> {
        let all = [&self.ready, &self.done].into_iter().chain(&self.sent).chain(&self.taken);
        all.map(Fence::export).collect()
    }
}

/// Creates the fences of this member and exchanges them. All members call it. Returns the own ones, and those of all
/// members in order, with none for ourselves.
pub(super) fn exchange(
    group: &Group,
    gpu: &Gpu,
    facts: &[MemberFacts],
) -> Result<(Arc<OwnFences>, Vec<Option<PeerFences>>)> {
    let processes = facts.iter().any(|fact| fact.pid != facts[0].pid);
    let failed = |error: CudaError| group.misuse(error.to_string());
    let own = Arc::new(OwnFences::new(gpu, group.size(), processes).map_err(failed)?);
    let peers = match processes {
        false => between_threads(group, &own)?,
        true => {
            let names = own.names().map_err(failed)?.concat();
            let mut all = vec![0u8; names.len() * group.size()];
            group.all_gather(&names, &mut all)?;
            let (me, members) = (group.rank(), group.size());
            let opened = all.chunks(names.len()).enumerate().map(|(m, names)| match m == me {
                true => Ok(None),
                false => open(gpu, names, me, members).map(Some),
            });
            let opened: std::result::Result<Vec<_>, _> = opened.collect();
            // All members have opened all fences before anyone can fail and drop them.
            group.barrier()?;
            opened.map_err(failed)?
        }
    };
    Ok((own, peers))
}

/// Opens the fences of another process that concern member `me`.
fn open(
    gpu: &Gpu,
    names: &[u8],
    me: usize,
    members: usize,
) -> std::result::Result<PeerFences, CudaError> {
    let fence = |i: usize| {
        let name = names[64 * i..64 * (i + 1)].try_into().expect("64 bytes");
        Fence::open(&gpu.context, name)
    };
    let (sent, taken) = (fence(2 + me)?, fence(2 + members + me)?);
    Ok(PeerFences::Process { ready: fence(0)?, done: fence(1)?, sent, taken })
}

/// Gives every member the fences of all, which are threads of one process.
fn between_threads(group: &Group, own: &Arc<OwnFences>) -> Result<Vec<Option<PeerFences>>> {
    // A member adds a reference for each of the others, which they take over.
    (1..group.size()).for_each(|_| std::mem::forget(own.clone()));
    let mut addresses = vec![0i64; group.size()];
    let address = Arc::as_ptr(own).expose_provenance() as i64;
    group.all_gather(&[address], &mut addresses)?;
    let member = |(m, address): (usize, &i64)| match m == group.rank() {
        true => None,
        // SAFETY: the member is a thread of this process and has added a reference to this type for us.
        false => Some(PeerFences::Thread(unsafe {
            Arc::from_raw(std::ptr::with_exposed_provenance(*address as usize))
        })),
    };
    Ok(addresses.iter().enumerate().map(member).collect())
}
