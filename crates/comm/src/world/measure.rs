//! Measures the links when a world starts, for a few milliseconds or, on a slow network, a few round trips, so
//! that algorithms are chosen for this machine.

use crate::algo::choose::{LinkCost, LinkCosts};
use crate::call::error::Result;
use crate::world::World;
use std::time::{Duration, Instant};

const PINGS: usize = 16;
const PIECE: usize = 512 << 10;
const PIECES: usize = 3;
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
    let mut piece = vec![0u8; PIECE];
    if world.rank() == peer {
        for len in [1, 1, PIECE] {
            piece[0] = MORE;
            while piece[0] == MORE {
                world.receive(&mut piece[..len], 0)?;
                world.send(&[0u8], 0)?;
            }
        }
    }
    if world.rank() != 0 {
        return Ok(None);
    }
    // The first message opens the links, which takes several round trips.
    best_of(world, peer, &mut piece[..1], 1)?;
    let round_trip = best_of(world, peer, &mut piece[..1], PINGS)?;
    let one_way = best_of(world, peer, &mut piece, PIECES)?;
    let bandwidth = PIECE as f64 / (one_way - round_trip).max(one_way / 10.0);
    Ok(Some(LinkCost { latency: round_trip / 2.0, bandwidth }))
}

/// Rank 0: the shortest time of up to `times` messages and answers, to exclude other activity of the machine.
fn best_of(world: &World, peer: usize, message: &mut [u8], times: usize) -> Result<f64> {
    let (mut best, begin) = (f64::INFINITY, Instant::now());
    for time in 1..=times {
        let last = time == times || begin.elapsed() > BUDGET;
        message[0] = if last { LAST } else { MORE };
        let start = Instant::now();
        world.send(message, peer)?;
        world.receive(&mut [0u8], peer)?;
        best = best.min(start.elapsed().as_secs_f64());
        if last {
            break;
        }
    }
    Ok(best)
}
