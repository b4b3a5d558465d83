//! `lockstep bench machine`: measures this machine and writes a description that `plan` and `train` read.

mod busy;
mod cluster;
mod file;
mod gpu;
mod pass;
mod passes;
mod references;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_sim::{Accelerator, Cluster, Curve, Engine, Fitted, Link, fit};

use crate::commands::device;
use crate::machine::available_memory;
use crate::print::{print_error, print_line};
use crate::world::{self, Start};
pub use file::{GPU, SHARED};
use pass::Pass;
use passes::{Average, Passes};

/// Measure this machine and write a description for `plan` and `train`
///
/// For each number of ranks, all ranks run at once on their share of the cores. They measure copies, matrix
/// multiplications and the steps of reference models, operation by operation. The measurement is repeated in several
/// rounds, because the speed of a machine can change over time. Rounds in which other programs use the cores are
/// repeated.
///
/// On a GPU it measures matrix multiplications, attention, copies, launches and the steps of reference models. The file
/// has one description per number of ranks and one per GPU; those that are not measured again are kept.
#[derive(clap::Args)]
pub struct Args {
    /// Device to measure
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceArg,
    /// Measure the links between the ranks of a launcher, and write a cluster file for `plan`: run `lockstep launch …
    /// lockstep bench machine --cluster cluster.toml`, after `bench machine` on one host
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Numbers of ranks to measure, on CPUs
    #[arg(long, default_value = "1,2,4", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Number of rounds, on CPUs
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// File to write; `train` reads runs/machine.toml by default
    #[arg(long, default_value = "runs/machine.toml")]
    out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DeviceArg {
    /// The GPU if there is one that can be used, otherwise the CPU
    Auto,
    Cpu,
    Cuda,
}

/// Timeout of collectives.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of rounds per valid round.
const MAX_REPEATS: usize = 3;
/// Number of attempts to fit a description to the measurement.
const ATTEMPTS: usize = 2;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.ranks.is_empty() || args.ranks.contains(&0) {
        bail!("--ranks must be a list of numbers that are at least 1, e.g. 1,2,4");
    }
    if args.rounds == 0 {
        bail!("--rounds must be at least 1 (got 0)");
    }
    if let Some(file) = &args.cluster {
        return cluster::run(file, &args.out);
    }
    let result = args.out.with_extension("pass.json");
    if world::is_launched() {
        return world::run(&start(None), TIMEOUT, |world| pass::run(world, &result));
    }
    if let Some(folder) = args.out.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    device::report().iter().for_each(|line| print_line!("{line}"));
    let on_gpu = match args.device {
        DeviceArg::Auto => device::has_usable_gpu(),
        DeviceArg::Cpu => false,
        DeviceArg::Cuda => true,
    };
    let tables = if on_gpu { gpu_table(&args)? } else { cpu_tables(&args, &result)? };
    file::update(&args.out, tables)?;
    print_line!("wrote {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// The description of the first GPU.
fn gpu_table(args: &Args) -> anyhow::Result<file::Tables> {
    let cluster = gpu::measure(&args.out)?;
    let table = toml::Value::try_from(&cluster).context("cannot serialize the cluster")?;
    Ok(file::Tables::one(file::GPU, &cluster.accelerator.name, table))
}

/// The descriptions of the cores for each number of ranks.
fn cpu_tables(args: &Args, result: &Path) -> anyhow::Result<file::Tables> {
    let mut all: Vec<Passes> = args.ranks.iter().map(|ranks| Passes::new(*ranks)).collect();
    measure(&mut all, args.rounds, result)?;
    let mut tables = file::Tables::default();
    for passes in all {
        let ranks = passes.ranks.to_string();
        let cluster = describe(passes, args.rounds, result)?;
        let table = toml::Value::try_from(&cluster).context("cannot serialize the cluster")?;
        tables.add(file::SHARED, &ranks, table);
    }
    Ok(tables)
}

fn start(ranks: Option<usize>) -> Start {
    Start { engine: world::Engine::Shm, ranks, default_ranks: 1, logs: None }
}

/// Runs passes in turn for each number of ranks, until each has `rounds` passes that other programs did not disturb.
fn measure(all: &mut [Passes], rounds: usize, result: &Path) -> anyhow::Result<()> {
    for _ in 0..rounds * MAX_REPEATS {
        for passes in all.iter_mut().filter(|passes| passes.undisturbed() < rounds) {
            world::run(&start(Some(passes.ranks)), TIMEOUT, |world| pass::run(world, result))?;
            let pass =
                take_pass(result).with_context(|| format!("measuring {} rank(s)", passes.ranks))?;
            passes.all.push(pass);
        }
    }
    Ok(())
}

/// Reads and removes the file that rank 0 wrote.
fn take_pass(path: &Path) -> anyhow::Result<Pass> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("the ranks did not write {}", path.display()))?;
    std::fs::remove_file(path)?;
    Ok(serde_json::from_str(&text)?)
}

/// Fits a description to the passes. Measures again if that fails.
fn describe(mut passes: Passes, rounds: usize, result: &Path) -> anyhow::Result<Cluster> {
    let ranks = passes.ranks;
    for attempt in 1..=ATTEMPTS {
        let average = passes.average(rounds)?;
        let Average { matmuls, steps, skew, others, .. } = &average;
        match fit(&initial_cluster(ranks, &average)?, matmuls, steps, *skew) {
            Ok(fitted) => {
                print(ranks, &average, &fitted);
                return Ok(fitted.cluster);
            }
            Err(why) if attempt < ATTEMPTS => {
                print_error!("{why}; measuring {ranks} rank(s) again");
                passes.all.clear();
                measure(std::slice::from_mut(&mut passes), rounds, result)?;
            }
            Err(why) => bail!(
                "{ranks} rank(s): {why} in {ATTEMPTS} attempts; other programs took {:.0}% of the cores: stop \
                 them, or increase --rounds",
                100.0 * others
            ),
        }
    }
    unreachable!("the last attempt returns")
}

/// The description before fitting. All cores together are one accelerator.
fn initial_cluster(ranks: usize, average: &Average) -> anyhow::Result<Cluster> {
    let mut accelerator = Accelerator::built_in("cpu").context("no built-in accelerator cpu")?;
    accelerator.name = "this machine".into();
    accelerator.memory_gib = available_memory()? as f64 / (1u64 << 30) as f64;
    // On a CPU, starting a kernel is a function call.
    (accelerator.kernel_us, accelerator.launch_us) = (0.0, 0.0);
    accelerator.step_us = 0.0;
    (accelerator.bandwidth_gbs, accelerator.stream) = (average.copy_gbs[1] * ranks as f64, 1.0);
    let link = Link {
        name: "memory".into(),
        span: None,
        start_us: 0.0,
        hop_us: 1.0,
        bandwidth_gbs: 8.0,
        rails: None,
        oversubscription: 1.0,
    };
    Ok(Cluster {
        name: format!("this machine, shared by {ranks}"),
        accelerator,
        per_host: ranks,
        ranks: Some(ranks),
        cores: Some(std::thread::available_parallelism().map_or(1, |cores| cores.get())),
        links: vec![link],
        engine: Engine::Lockstep,
        skew: Curve::default(),
        differs: Vec::new(),
    })
}

fn print(ranks: usize, average: &Average, fitted: &Fitted) {
    let Cluster { accelerator: device, links, skew, .. } = &fitted.cluster;
    let threads = average.steps[0].plan.train.threads;
    print_line!(
        "{ranks} rank(s) × {threads} thread(s): all cores reach {:.0} GFLOP/s in f32 and {:.0} in bf16; each rank copies {:.1} GB/s in memory and {:.1} GB/s in cache",
        1e3 * device.peak.f32,
        1e3 * device.peak.bf16,
        average.copy_gbs[1],
        average.copy_gbs[0],
    );
    if ranks > 1 {
        print_line!(
            "  reductions: {:.2} GB/s and {:.0} µs per step of a collective; waiting for slower ranks: {:.1}% of a 0.1 s step, {:.1}% of a 10 s step",
            links[0].bandwidth_gbs,
            links[0].hop_us,
            100.0 * skew.at(0.1).unwrap_or(0.0),
            100.0 * skew.at(10.0).unwrap_or(0.0)
        );
    }
    let max_error = |ratio: fn(&(f64, f64)) -> f64| {
        fitted.steps.iter().map(|step| (ratio(step) - 1.0).abs()).fold(0.0, f64::max)
    };
    print_line!(
        "  error of the fit: {:.1}% on average for matrix multiplications; at most {:.1}% for reference steps, {:.1}% for steps left out of the fit",
        100.0 * fitted.matmul_error,
        100.0 * max_error(|(with, _)| *with),
        100.0 * max_error(|(_, without)| *without),
    );
    if average.others > busy::MAX_OTHERS {
        print_line!(
            "  warning: other programs took {:.0}% of the cores during the measurement",
            100.0 * average.others
        );
    }
}
