//! Determines, when a world starts, how the ranks of each host may access each other's buffers.

use crate::call::error::Result;
use crate::call::fold::Op;
use crate::memory::cross_process::{RemoteAddress, pull};
use crate::memory::heap::{self, PeerHeaps};
use crate::memory::segment::{Address, Segment};
use crate::world::World;
use std::sync::atomic::Ordering;

/// Enables direct access if all ranks want it, and the methods that work on all of them.
pub(crate) fn negotiate(world: &World, wanted: bool) -> Result<()> {
    let direct = all_agree(world, wanted)?;
    world.context().access.direct.store(direct, Ordering::Relaxed);
    if direct {
        try_cross_memory(world)?;
        map_heaps(world)?;
    }
    Ok(())
}

fn all_agree(world: &World, vote: bool) -> Result<bool> {
    let mut votes = [i32::from(vote)];
    world.all_reduce(&mut votes, Op::Min)?;
    Ok(votes[0] == 1)
}

/// Every rank reads a number from every other rank of its host; cross-memory is used if all succeed.
fn try_cross_memory(world: &World) -> Result<()> {
    let number = Box::new(0x010c_57e9_u64 ^ world.rank() as u64);
    let own = [i64::from(std::process::id()), (&raw const *number) as i64];
    let mut all = vec![0i64; 2 * world.size()];
    world.all_gather(&own, &mut all)?;
    let hosts = world.hosts();
    let readable = |rank: usize| {
        let from = RemoteAddress { pid: all[2 * rank] as u32, at: all[2 * rank + 1] as u64 };
        let mut read = 0u64;
        // SAFETY: our own variable, eight bytes long.
        let pulled = unsafe { pull(from, (&raw mut read).cast(), 8) };
        pulled.is_ok() && read == 0x010c_57e9 ^ rank as u64
    };
    let mut locals = (0..world.size()).filter(|r| hosts[*r] == hosts[world.rank()]);
    // The vote also keeps all numbers alive until all ranks have read them.
    let works = all_agree(world, locals.all(readable))?;
    drop(number);
    world.context().access.cross_memory.store(works, Ordering::Relaxed);
    Ok(())
}

/// Maps the heaps of all ranks of the host, if all ranks have one and can map all the others.
fn map_heaps(world: &World) -> Result<()> {
    let rank = world.rank();
    let own = heap::address().map_or([0, -1], |a| [a.pid as i64, a.fd as i64]);
    let mut all = vec![0i64; 2 * world.size()];
    world.all_gather(&own, &mut all)?;
    let hosts = world.hosts();
    let is_local_peer = |r: usize| r != rank && hosts[r] == hosts[rank];
    let map = |r: usize| {
        let address = Address { pid: all[2 * r] as u64, fd: all[2 * r + 1] as u64 };
        let has_heap = is_local_peer(r) && all[2 * r + 1] >= 0;
        has_heap.then(|| Segment::open(address, heap::CAPACITY).ok()).flatten()
    };
    let heaps: Vec<_> = (0..world.size()).map(map).collect();
    let complete = (0..world.size()).filter(|r| is_local_peer(*r)).all(|r| heaps[r].is_some());
    if all_agree(world, complete && own[1] >= 0)? {
        let _ = world.context().access.heaps.set(PeerHeaps(heaps));
    }
    Ok(())
}
