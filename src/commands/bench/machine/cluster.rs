//! `bench machine --cluster`: measures the links inside hosts and between them, and writes a cluster file for `plan`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_comm::{Op, World};
use lockstep_kernels::Device;
use lockstep_launch::identity;
use lockstep_launch::selftest::{LinkRates, measure_links};
use lockstep_sim::{Cluster, Engine, Link};

use super::{TIMEOUT, file, start};
use crate::commands::device;
use crate::machine;
use crate::print::print_line;
use crate::world;

/// Bytes of the messages that measure links.
const BYTES: usize = 64 << 20;

/// Measures the links of the launcher's ranks. Rank 0 writes `out`, with the accelerator described in `described`.
pub fn run(out: &Path, described: &Path) -> anyhow::Result<ExitCode> {
    if !world::is_launched() {
        bail!(
            "--cluster measures the ranks of a launcher: run `lockstep launch --nproc-per-node 8 -- lockstep bench \
             machine --cluster {}` on every host, with --nnodes, --node-rank and --master-addr",
            out.display()
        );
    }
    let node = identity::from_process_env()?.node;
    world::run(&start(None), TIMEOUT, |world| {
        let mut nodes = vec![0i64; world.size()];
        world.all_gather(&[node as i64], &mut nodes)?;
        let nodes: Vec<usize> = nodes.into_iter().map(|node| node as usize).collect();
        let links = slowest(world, measure_links(world, &nodes, BYTES)?)?;
        if world.rank() == 0 {
            let cluster = describe(&nodes, &links, described)?;
            cluster.check().map_err(anyhow::Error::msg)?;
            file::write_atomically(out, &toml::to_string(&cluster)?)?;
            for link in &cluster.links {
                print_line!(
                    "{}: {:.2} GB/s per rank in all-reduce, {:.1} µs",
                    link.name,
                    link.bandwidth_gbs,
                    link.hop_us
                );
            }
            print_line!("wrote {}", out.display());
        }
        Ok(world.barrier()?)
    })
}

/// The slowest of all ranks: it decides the speed of collectives.
fn slowest(world: &World, links: LinkRates) -> anyhow::Result<LinkRates> {
    let LinkRates { inside, between, all_reduce_inside, all_reduce_between } = links;
    let rate = |link: Option<[f64; 2]>| link.map(|[rate, _]| rate);
    let rates = [rate(inside), rate(between), all_reduce_inside, all_reduce_between];
    let mut rates = rates.map(|rate| rate.unwrap_or(f64::INFINITY));
    let mut latencies = [inside, between].map(|link| link.map_or(0.0, |[_, latency]| latency));
    world.all_reduce(&mut rates, Op::Min)?;
    world.all_reduce(&mut latencies, Op::Max)?;
    let known = |rate: f64| rate.is_finite().then_some(rate);
    let link = |at: usize| known(rates[at]).map(|rate| [rate, latencies[at]]);
    Ok(LinkRates {
        inside: link(0),
        between: link(1),
        all_reduce_inside: known(rates[2]),
        all_reduce_between: known(rates[3]),
    })
}

/// The cluster: the described machine, or the built-in one of its GPU, with the measured links.
fn describe(nodes: &[usize], links: &LinkRates, described: &Path) -> anyhow::Result<Cluster> {
    let per_host = nodes.iter().filter(|node| **node == nodes[0]).count();
    let is_mixed = |chunk: &[usize]| chunk.iter().any(|node| *node != chunk[0]);
    if !nodes.len().is_multiple_of(per_host) || nodes.chunks(per_host).any(is_mixed) {
        bail!("the hosts have different numbers of ranks; start the same number on each");
    }
    let mut cluster = match described.exists() {
        true => machine::cluster(&described.display().to_string(), Some(per_host), None)?,
        false => unmeasured()?,
    };
    let link = |name: &str, span, pair: Option<[f64; 2]>, all_reduce: Option<f64>| {
        let ([rate, latency], all_reduce) = (pair?, all_reduce?);
        Some(Link {
            name: name.into(),
            span,
            start_us: 0.0,
            hop_us: 1e6 * latency,
            bandwidth_gbs: 1e-9 * all_reduce.max(rate / per_host as f64),
            rails: None,
            oversubscription: 1.0,
        })
    };
    let hosts = nodes.len() / per_host;
    let span = (hosts > 1).then_some(per_host);
    let inside = link("inside the host", span, links.inside, links.all_reduce_inside);
    let between = link("between hosts", None, links.between, links.all_reduce_between);
    let measured: Vec<Link> = inside.into_iter().chain(between).collect();
    if measured.is_empty() {
        bail!("one rank has no links; start at least two");
    }
    cluster.links = measured;
    cluster.name = format!("{hosts} host(s) of {per_host} rank(s)");
    (cluster.per_host, cluster.ranks) = (per_host, Some(nodes.len()));
    cluster.engine = Engine::Lockstep;
    Ok(cluster)
}

/// The built-in description of this machine's accelerator.
fn unmeasured() -> anyhow::Result<Cluster> {
    if device::has_usable_gpu() {
        let report = Device::cuda(0)?.cuda_report().context("GPU 0 is not a CUDA device")?;
        return Cluster::of_gpu(&report.gpu).with_context(|| {
            format!("{} is not a known GPU; run `lockstep bench machine` first", report.gpu)
        });
    }
    let mut cluster = Cluster::built_in("cpu").context("no built-in cluster cpu")?;
    cluster.cores = Some(std::thread::available_parallelism().map_or(1, |cores| cores.get()));
    Ok(cluster)
}
