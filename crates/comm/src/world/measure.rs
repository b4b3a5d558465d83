//! Measures the links when a world starts, for a few milliseconds or, on a slow network, a few round trips, so
//! that algorithms are chosen for this machine.

use crate::algo::choose::{LinkCost, LinkCosts};
use crate::call::error::Result;
use crate::world::World;
use std::time::{Duration, Instant};

const PINGS: usize = 16;
const PIECE: usize = 512 << 10;
const PIECES: usize = 3;
const COPY: usize = 4 << 20;
const COPIES: usize = 4;
/// Time after which a measurement is not repeated.
const BUDGET: Duration = Duration::from_millis(50);

/// First byte of a message: whether another one of the same length follows.
const LAST: u8 = 0;
const MORE: u8 = 1;

/// Rank 0 measures with one rank of its host and one of another host; all ranks get the result.
pub(crate) fn measure(world: &World) -> Result<()> {
    let hosts = world.hosts();
    let partner = |local: bool| (1..world.size()).find(|r| (hosts[*r] == hosts[0]) == local);
    let mut costs = LinkCosts::default();
    if let Some(latency) = partner(true).map(|peer| latency(world, peer)).transpose()? {
        costs.local = LinkCost { latency, bandwidth: copy_bandwidth() };
    }
    if let Some(peer) = partner(false) {
        let latency = latency(world, peer)?;
        costs.remote = LinkCost { latency, bandwidth: bandwidth(world, peer, latency)? };
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

/// Latency of the link between rank 0 and a peer; valid on rank 0.
fn latency(world: &World, peer: usize) -> Result<f64> {
    // The first message opens the links, which takes several round trips.
    best_of(world, peer, 1, 1)?;
    Ok(best_of(world, peer, 1, PINGS)? / 2.0)
}

/// Bandwidth of the link between rank 0 and a peer; valid on rank 0.
fn bandwidth(world: &World, peer: usize, latency: f64) -> Result<f64> {
    let time = best_of(world, peer, PIECE, PIECES)?;
    Ok(PIECE as f64 / (time - 2.0 * latency).max(time / 10.0))
}

/// Bandwidth within a host: that of a copy, because collectives there copy from memory to memory. Messages between
/// two ranks would measure how fast they wake up each other, which takes long if there are more ranks than cores.
fn copy_bandwidth() -> f64 {
    let (from, mut to) = (vec![1u8; COPY], vec![0u8; COPY]);
    let copy = |_| {
        let start = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        start.elapsed().as_secs_f64()
    };
    // The first copy maps the pages.
    COPY as f64 / (0..COPIES).map(copy).fold(f64::INFINITY, f64::min)
}

/// The shortest time of up to `times` messages of `len` bytes from rank 0 to `peer` and answers, to exclude other
/// activity of the machine; valid on rank 0.
fn best_of(world: &World, peer: usize, len: usize, times: usize) -> Result<f64> {
    let mut message = vec![MORE; len];
    if world.rank() == peer {
        while message[0] == MORE {
            world.receive(&mut message, 0)?;
            world.send(&[0u8], 0)?;
        }
    }
    if world.rank() != 0 {
        return Ok(0.0);
    }
    let (mut best, begin) = (f64::INFINITY, Instant::now());
    for time in 1..=times {
        if time == times || begin.elapsed() > BUDGET {
            message[0] = LAST;
        }
        let start = Instant::now();
        world.send(&message, peer)?;
        world.receive(&mut [0u8], peer)?;
        best = best.min(start.elapsed().as_secs_f64());
        if message[0] == LAST {
            break;
        }
    }
    Ok(best)
}
