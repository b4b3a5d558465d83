//! Checks the hosts of a cluster before a run: versions, links, collectives, clocks and storage. All ranks take part, and
//! all get the same report. Knows nothing about models.

mod links;
mod report;
mod storage;

pub use links::{LinkRates, measure_links};
pub use report::{Check, HostReport, SelfTestReport, Status};

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use half::bf16;
use lockstep_comm::{Element, Op, Result, World};
use serde::{Deserialize, Serialize};

use crate::topology::Topology;

/// Inputs of a rank.
pub struct SelfTest {
    /// Index of this rank's host, from the launcher.
    pub node: usize,
    pub host: String,
    /// Versions that must be equal on all hosts: program, driver, libraries.
    pub versions: BTreeMap<String, String>,
    /// Problems that were found before the ranks connected, each with what to do.
    pub problems: Vec<String>,
    /// Time from the start of the process until all ranks were connected.
    pub rendezvous: Duration,
    /// Directory that contains run folders.
    pub folder: PathBuf,
    /// Bytes to write to it per host.
    pub storage_bytes: usize,
    /// Bytes of the messages that measure links.
    pub link_bytes: usize,
}

/// Results of one rank. Rates are in bytes per second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Facts {
    node: usize,
    host: String,
    versions: BTreeMap<String, String>,
    problems: Vec<String>,
    gpus: usize,
    network_gbs: Option<f64>,
    rendezvous: f64,
    links: LinkRates,
    /// Wrong elements of all-reduce.
    wrong: u64,
    /// Seconds by which the clock is ahead of that of rank 0, and the error of this figure.
    clock: [f64; 2],
    storage: storage::Storage,
}

/// Runs all checks. Collective; every rank returns the same report.
pub fn run(world: &World, test: &SelfTest) -> Result<SelfTestReport> {
    let topology = Topology::of_this_host();
    let nodes = gather_nodes(world, test.node)?;
    let facts = Facts {
        node: test.node,
        host: test.host.clone(),
        versions: test.versions.clone(),
        problems: test.problems.clone(),
        gpus: topology.gpus.len(),
        network_gbs: topology.network_gbs(),
        rendezvous: test.rendezvous.as_secs_f64(),
        clock: clock(world)?,
        wrong: wrong_sums(world)?,
        links: measure_links(world, &nodes, test.link_bytes)?,
        storage: storage::measure(world, &nodes, &test.folder, test.storage_bytes)?,
    };
    Ok(report::judge(&gather_facts(world, &facts)?))
}

/// The node of every rank.
fn gather_nodes(world: &World, node: usize) -> Result<Vec<usize>> {
    let mut nodes = vec![0i64; world.size()];
    world.all_gather(&[node as i64], &mut nodes)?;
    Ok(nodes.into_iter().map(|node| node as usize).collect())
}

/// Size of a rank's facts as JSON, padded with spaces.
const FACTS_BYTES: usize = 16 << 10;

fn gather_facts(world: &World, facts: &Facts) -> Result<Vec<Facts>> {
    let short = Facts { problems: vec!["too many problems to list".into()], ..facts.clone() };
    let mut own = serde_json::to_vec(facts).unwrap_or_default();
    if own.len() > FACTS_BYTES {
        own = serde_json::to_vec(&short).unwrap_or_default();
    }
    own.resize(FACTS_BYTES, b' ');
    let mut all = vec![0u8; FACTS_BYTES * world.size()];
    world.all_gather(&own, &mut all)?;
    let parse = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap_or_default();
    Ok(all.chunks(FACTS_BYTES).map(parse).collect())
}

/// Number of wrong elements on this rank in all-reduces of several types and lengths.
fn wrong_sums(world: &World) -> Result<u64> {
    let mut wrong = 0;
    for length in [1, 1000, 1 << 20] {
        wrong += wrong_of(world, length, Op::Sum, |n| n as f32)?;
        wrong += wrong_of(world, length, Op::Sum, |n| n as i64)?;
        // Sums of many ranks are not exact in bf16.
        wrong += wrong_of(world, length, Op::Max, |n| bf16::from_f32(n as f32))?;
    }
    Ok(wrong)
}

fn wrong_of<T: Element + PartialEq>(
    world: &World,
    length: usize,
    op: Op,
    value: impl Fn(usize) -> T,
) -> Result<u64> {
    // The values repeat, so few results are different.
    const PERIOD: usize = 5;
    let of_rank = |rank: usize, index: usize| (index + rank) % PERIOD;
    let values = |index: usize| (0..world.size()).map(move |rank| of_rank(rank, index));
    let expected: Vec<T> = (0..PERIOD)
        .map(|index| match op {
            Op::Max => value(values(index).max().unwrap_or(0)),
            _ => value(values(index).sum()),
        })
        .collect();
    let mut buffer: Vec<T> = (0..length).map(|index| value(of_rank(world.rank(), index))).collect();
    world.all_reduce(&mut buffer, op)?;
    let is_wrong = |(index, found): &(usize, &T)| **found != expected[index % PERIOD];
    Ok(buffer.iter().enumerate().filter(is_wrong).count() as u64)
}

/// Rounds of the clock comparison; the fastest counts.
const CLOCK_ROUNDS: usize = 10;

/// Seconds by which this rank's clock is ahead of that of rank 0, and the error of the figure. Rank 0 answers one rank
/// after the other.
fn clock(world: &World) -> Result<[f64; 2]> {
    let now =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let mut best = [0.0, f64::INFINITY];
    for other in 1..world.size() {
        for _ in 0..CLOCK_ROUNDS {
            let mut time = [0.0f64];
            if world.rank() == 0 {
                world.receive(&mut time, other)?;
                world.send(&[now()], other)?;
            } else if world.rank() == other {
                let sent = now();
                world.send(&[sent], 0)?;
                world.receive(&mut time, 0)?;
                let half = (now() - sent) / 2.0;
                if half < best[1] {
                    best = [sent + half - time[0], half];
                }
            }
        }
    }
    Ok(if world.rank() == 0 { [0.0, 0.0] } else { best })
}
