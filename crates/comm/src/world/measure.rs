//! Measures the links when a world starts, for a few milliseconds, so that algorithms are chosen for this
//! machine.

use crate::algo::choose::{LinkCost, LinkCosts};
use crate::call::error::Result;
use crate::world::World;
use std::time::Instant;

const PINGS: usize = 16;
const PIECE: usize = 512 << 10;
const PIECES: usize = 3;

/// Rank 0 measures with one rank of its host and one of another host; all ranks get the result.
pub(crate) fn measure(world: &World) -> Result<()> {
    let hosts = world.hosts();
    let partner = |local: bool| (1..world.size()).find(|r| (hosts[*r] == hosts[0]) == local);
    let mut costs = LinkCosts::default();
    if let Some(peer) = partner(true) {
        costs.local = measure_with(world, peer)?.unwrap_or(costs.local);
    }
    if let Some(peer) = partner(false) {
        costs.remote = measure_with(world, peer)?.unwrap_or(costs.remote);
    }
    let (local, remote) = (costs.local, costs.remote);
    let mut numbers = [local.latency, local.bandwidth, remote.latency, remote.bandwidth];
    world.broadcast(&mut numbers, 0)?;
    let [a, b, c, d] = numbers;
    let costs = LinkCosts {
        local: LinkCost { latency: a, bandwidth: b },
        remote: LinkCost { latency: c, bandwidth: d },
    };
    let _ = world.context().measured.set(costs);
    Ok(())
}

/// Cost of the link between rank 0 and a peer; the result is on rank 0.
fn measure_with(world: &World, peer: usize) -> Result<Option<LinkCost>> {
    let mut small = [0u8];
    let mut large = vec![0u8; PIECE];
    if world.rank() == peer {
        for _ in 0..PINGS {
            world.receive(&mut small, 0)?;
            world.send(&small, 0)?;
        }
        for _ in 0..PIECES {
            world.receive(&mut large, 0)?;
            world.send(&small, 0)?;
        }
    }
    if world.rank() != 0 {
        return Ok(None);
    }
    // The best of several, to exclude other activity of the machine.
    let mut round_trip = f64::INFINITY;
    for _ in 0..PINGS {
        let start = Instant::now();
        world.send(&small, peer)?;
        world.receive(&mut small, peer)?;
        round_trip = round_trip.min(start.elapsed().as_secs_f64());
    }
    let mut one_way = f64::INFINITY;
    for _ in 0..PIECES {
        let start = Instant::now();
        world.send(&large, peer)?;
        world.receive(&mut small, peer)?;
        one_way = one_way.min(start.elapsed().as_secs_f64());
    }
    let bandwidth = PIECE as f64 / (one_way - round_trip).max(one_way / 10.0);
    Ok(Some(LinkCost { latency: round_trip / 2.0, bandwidth }))
}
