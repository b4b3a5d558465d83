//! Bandwidth and latency of the links between ranks, by messages in host memory.

use std::time::Instant;

use lockstep_comm::{Op, Result, World};
use serde::{Deserialize, Serialize};

/// Measured links of a rank, as far as it took part. Rates are in bytes per second in one direction, latencies in
/// seconds one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkRates {
    /// To the next rank of the same host.
    pub inside: Option<[f64; 2]>,
    /// From the first rank of the host to that of the next host.
    pub between: Option<[f64; 2]>,
    /// Bytes per second and rank of an all-reduce inside the host, and of one between hosts by all ranks of a host at
    /// the same time.
    pub all_reduce_inside: Option<f64>,
    pub all_reduce_between: Option<f64>,
}

/// Messages that are timed per measurement; the fastest counts for latency, all of them for bandwidth.
const MESSAGES: usize = 4;
const PINGS: usize = 20;

/// Measures links. `nodes` has the host of each rank. Collective.
pub fn measure_links(world: &World, nodes: &[usize], bytes: usize) -> Result<LinkRates> {
    let first = |node: usize| nodes.iter().position(|other| *other == node);
    let count = nodes.iter().max().map_or(0, |last| last + 1);
    let mine = nodes[world.rank()];
    let mut rates = LinkRates::default();
    // Pairs inside hosts: the first two ranks of each, all hosts at the same time.
    let local: Vec<usize> = (0..nodes.len()).filter(|rank| nodes[*rank] == mine).collect();
    world.barrier()?;
    if let [a, b, ..] = local[..] {
        rates.inside = pair(world, [a, b], bytes)?;
    }
    // Neighbouring hosts: first the pairs that start at even ones, then the others.
    for parity in [0, 1] {
        world.barrier()?;
        for node in (parity..count.saturating_sub(1)).step_by(2) {
            let (Some(a), Some(b)) = (first(node), first(node + 1)) else { continue };
            if let Some(found) = pair(world, [a, b], bytes)? {
                // The slower of a host's two neighbours counts.
                let slower = |before: [f64; 2]| if before[0] < found[0] { before } else { found };
                rates.between = Some(rates.between.map_or(found, slower));
            }
        }
    }
    world.barrier()?;
    let position = local.iter().position(|rank| *rank == world.rank()).unwrap_or(0);
    let inside = world.split(Some(mine as i64), world.rank() as i64, "inside a host")?;
    let between = world.split(Some(position as i64), world.rank() as i64, "between hosts")?;
    let time = |group: Option<lockstep_comm::Group>| -> Result<Option<f64>> {
        let Some(group) = group.filter(|group| group.size() > 1) else { return Ok(None) };
        let mut buffer = vec![0f32; bytes / 4];
        group.all_reduce(&mut buffer, Op::Sum)?;
        group.barrier()?;
        let start = Instant::now();
        (0..MESSAGES).try_for_each(|_| group.all_reduce(&mut buffer, Op::Sum))?;
        let seconds = start.elapsed().as_secs_f64() / MESSAGES as f64;
        // Each rank sends 2 (P - 1) / P of the buffer.
        let sent = 2.0 * (group.size() - 1) as f64 / group.size() as f64 * bytes as f64;
        Ok(Some(sent / seconds))
    };
    rates.all_reduce_inside = time(inside)?;
    world.barrier()?;
    rates.all_reduce_between = time(between)?;
    world.barrier()?;
    Ok(rates)
}

/// Bandwidth and latency between two ranks. None on the other ranks.
fn pair(world: &World, [a, b]: [usize; 2], bytes: usize) -> Result<Option<[f64; 2]>> {
    let peer = match world.rank() {
        rank if rank == a => b,
        rank if rank == b => a,
        _ => return Ok(None),
    };
    let round = |buffer: &mut [u8]| -> Result<f64> {
        let start = Instant::now();
        if world.rank() == a {
            world.send(buffer, peer)?;
            world.receive(buffer, peer)?;
        } else {
            world.receive(buffer, peer)?;
            world.send(buffer, peer)?;
        }
        Ok(start.elapsed().as_secs_f64() / 2.0)
    };
    let mut small = [0u8; 8];
    let mut latency = f64::INFINITY;
    for _ in 0..PINGS {
        latency = latency.min(round(&mut small)?);
    }
    let mut large = vec![1u8; bytes.max(1)];
    round(&mut large)?;
    let mut seconds = 0.0;
    for _ in 0..MESSAGES {
        seconds += round(&mut large)?;
    }
    // The first message of the other rank includes waiting, so both use the slower figure.
    Ok(Some([(MESSAGES * large.len()) as f64 / seconds, latency]))
}
