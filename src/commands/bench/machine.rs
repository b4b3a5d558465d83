//! `lockstep bench machine`: what this machine does when so many ranks share it, as a file that `plan` and `train` read.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use lockstep_comm::{Op, Options, World, on_threads_with};
use lockstep_kernels::{Device, Dtype, Matmul, Operation, Tag};
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Collective, Config, Plan};
use lockstep_sim::{Accelerator, Cluster, Engine, Link, Spread, collective_seconds, estimate};
use lockstep_trainer::Rank;

use crate::machine::available_memory;
use crate::run_file::RunFile;

/// This machine as a cluster: multiplies by size, attention, memory, and exchanges between ranks
///
/// Measured with all ranks at work at once, as threads of one process, each with its share of the cores. What single
/// operations do not show (passes over memory, and what lies between operations) is taken from steps of a reference
/// model, of which no other model is.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of ranks that share the machine
    #[arg(long, default_value = "1,2,4", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Where to write it; `train` looks for runs/machine.toml
    #[arg(long, default_value = "runs/machine.toml")]
    out: PathBuf,
}

/// Of the matrices that are multiplied: from those of the smallest models to those at which nothing gets faster.
const SIDES: [usize; 7] = [16, 32, 64, 128, 256, 512, 1024];
/// Bytes of a small and a large sum.
const SUMS: [usize; 2] = [4 << 10, 4 << 20];

/// A model like no other here: wider than the README's, smaller than `small`, half way between GPT-2 and Llama in what
/// its time goes to.
const REFERENCE: &str = "name = \"reference\"\n[model]\nfamily = \"llama\"\ndim = 256\nlayers = 4\nheads = 4\nseq = 192\n\
                         vocab = 2048\n[train]\nmicro_batch = 4\nsteps = 1000\n";

/// What one rank saw; all of them at once.
struct Seen {
    f32: f64,
    bf16: f64,
    curve: Vec<(f64, f64)>,
    sums: [f64; 2],
    step: f64,
    attention: f64,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.ranks.is_empty() || args.ranks.contains(&0) {
        bail!("--ranks: numbers of at least 1, as in 1,2,4");
    }
    let mut shared = toml::Table::new();
    for ranks in args.ranks {
        let cluster = measure(ranks)?;
        let device = &cluster.accelerator;
        println!(
            "{ranks} rank(s): {:.1} GFLOP/s in f32, {:.1} in bf16, attention at {:.0}% of it, {:.2} GB/s of passes over memory, sums at {:.2} GB/s",
            1e3 * device.peak.f32,
            1e3 * device.peak.bf16,
            100.0 * device.attention[0].0,
            device.bandwidth_gbs * device.stream,
            cluster.links[0].bandwidth_gbs
        );
        shared.insert(
            ranks.to_string(),
            toml::Value::try_from(&cluster).context("a cluster is plain data")?,
        );
    }
    let file = toml::Table::from_iter([("shared".to_string(), toml::Value::Table(shared))]);
    if let Some(folder) = args.out.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
    }
    std::fs::write(&args.out, toml::to_string(&file)?)
        .with_context(|| format!("cannot write {}", args.out.display()))?;
    println!("written to {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

fn measure(ranks: usize) -> anyhow::Result<Cluster> {
    let sets = [format!("layout.data={ranks}"), format!("train.global_batch={}", 4 * ranks)];
    let file = RunFile::of(Config::parse(REFERENCE, &sets))?;
    let plan = file.plan(ranks, ranks)?;
    let seen = on_threads_with(&Options::default(), ranks, |world| see(&world, &plan, &file));
    let seen = seen.into_iter().collect::<anyhow::Result<Vec<Seen>>>()?;
    // All ranks wait for the slowest.
    let most = |of: &dyn Fn(&Seen) -> f64| seen.iter().map(of).fold(0.0, f64::max);
    let least = |of: &dyn Fn(&Seen) -> f64| seen.iter().map(of).fold(f64::INFINITY, f64::min);
    let peak = least(&|seen| seen.f32);
    let mut cluster = blank(ranks, peak, least(&|seen| seen.bf16))?;
    let device = &mut cluster.accelerator;
    device.matmul.curve = SIDES
        .iter()
        .enumerate()
        .map(|(index, side)| (*side as f64, least(&|seen| seen.curve[index].1) / peak))
        .collect();
    // Of the reference: 3.5 forward passes of attention in a step, as the estimate counts them.
    let attended = flops_per_token(&plan.model, plan.data.seq).attention / 3.0 * 3.5;
    let tokens = (plan.tokens_per_step() / ranks) as f64;
    let reached = (attended * tokens / most(&|seen| seen.attention) / peak).min(1.0);
    device.attention = [(reached, 0.0), (reached, 0.0)];
    if ranks > 1 {
        fit_link(&mut cluster, ranks, [0, 1].map(|at| most(&|seen| seen.sums[at])));
    }
    fit_passes(&mut cluster, &plan, most(&|seen| seen.step));
    Ok(cluster)
}

/// Everything that is not measured, or not yet.
fn blank(ranks: usize, f32: f64, bf16: f64) -> anyhow::Result<Cluster> {
    let mut accelerator = Accelerator::built_in("cpu").context("an accelerator called cpu")?;
    accelerator.name = "this machine".into();
    (accelerator.peak.f32, accelerator.peak.bf16) = (f32 / 1e12, bf16 / 1e12);
    accelerator.memory_gib = available_memory()? as f64 / (1u64 << 30) as f64 / ranks as f64;
    (accelerator.matmul.best, accelerator.matmul.ramp) = (1.0, 0.0);
    // What is started at once waits for nobody.
    (accelerator.kernel_us, accelerator.launch_us) = (0.0, 0.0);
    (accelerator.bandwidth_gbs, accelerator.stream) = (1.0, 1.0);
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
        cores: None,
        links: vec![link],
        engine: Engine::Lockstep,
        differs: Vec::new(),
    })
}

fn see(world: &World, plan: &Plan, file: &RunFile) -> anyhow::Result<Seen> {
    let device = Device::cpu(plan.train.threads);
    let mut curve = Vec::new();
    for side in SIDES {
        world.barrier()?;
        curve.push((side as f64, multiply(&device, side, Dtype::F32)));
    }
    world.barrier()?;
    let (f32, bf16) = (curve[SIDES.len() - 1].1, multiply(&device, 1024, Dtype::Bf16));
    let mut sums = [0.0; 2];
    for (sum, bytes) in sums.iter_mut().zip(SUMS) {
        let mut buffer = vec![1.0_f32; bytes / 4];
        *sum = usual(20, || Ok(world.all_reduce(&mut buffer, Op::Max)?))?;
    }
    let mut rank = Rank::new(plan, world, device.clone())?;
    for step in 1..=3 {
        rank.step(&file.source, step)?;
    }
    device.meter().switch(true);
    let mut number = 3;
    let step = usual(STEPS, || {
        number += 1;
        rank.step(&file.source, number)?;
        Ok(())
    })?;
    device.meter().switch(false);
    let attention = device.meter().spent(Operation::Attention).as_secs_f64() / STEPS as f64;
    world.barrier()?;
    Ok(Seen { f32, bf16, curve, sums, step, attention })
}

const STEPS: usize = 15;

/// Operations per second of square multiplies.
fn multiply(device: &Device, side: usize, dtype: Dtype) -> f64 {
    let operand = || device.zeros(side, side, dtype, Tag::Buffers);
    let (a, b, mut out) = (operand(), operand(), operand());
    let work = 2.0 * (side as f64).powi(3);
    let mut multiply = || device.matmul(Matmul::linear(a.view(), b.view(), out.view_mut()));
    multiply();
    // So many that a tenth of a second passes at some ten GFLOP/s; in pieces, of which the lower quartile counts.
    let each = ((2e7 / work) as usize).max(1);
    let pieces = ((1e9 / work) as usize / each).clamp(3, 50);
    let mut times: Vec<f64> = (0..pieces)
        .map(|_| {
            let start = Instant::now();
            (0..each).for_each(|_| multiply());
            start.elapsed().as_secs_f64() / each as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    work / times[times.len() / 4]
}

/// Seconds of an act, of several the lower quartile: a busy neighbour only ever makes it longer.
fn usual(times: usize, mut act: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    act()?;
    let mut all = Vec::new();
    for _ in 0..times {
        let start = Instant::now();
        act()?;
        all.push(start.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all[all.len() / 4])
}

/// Latency and bandwidth with which the formulas of `comm` give what small and large sums took.
fn fit_link(cluster: &mut Cluster, ranks: usize, sums: [f64; 2]) {
    let spread = Spread { members: ranks, stride: 1 };
    let price = |cluster: &Cluster, bytes: usize| {
        collective_seconds(cluster, spread, Collective::AllReduce, bytes as f64)
    };
    // Each is nearly alone at its end, so that a few turns settle both.
    for _ in 0..4 {
        let bandwidth = search(1e-3, 1e3, |gbs| {
            cluster.links[0].bandwidth_gbs = gbs;
            price(cluster, SUMS[1]) < sums[1]
        });
        cluster.links[0].bandwidth_gbs = bandwidth;
        let slowness = search(1e-9, 1e9, |inverse| {
            cluster.links[0].hop_us = 1.0 / inverse;
            price(cluster, SUMS[0]) < sums[0]
        });
        cluster.links[0].hop_us = 1.0 / slowness;
    }
}

/// The rate of passes over memory with which the reference takes as long as it did.
fn fit_passes(cluster: &mut Cluster, plan: &Plan, step: f64) {
    let options = lockstep_sim::Options::default();
    cluster.accelerator.bandwidth_gbs = search(1e-2, 1e4, |gbs| {
        cluster.accelerator.bandwidth_gbs = gbs;
        estimate(plan, cluster, &options).step_s < step
    });
}

/// Where, from `low` to `high` by the logarithm, something that grows begins to be enough.
fn search(mut low: f64, mut high: f64, mut enough: impl FnMut(f64) -> bool) -> f64 {
    for _ in 0..60 {
        let middle = (low * high).sqrt();
        match enough(middle) {
            true => high = middle,
            false => low = middle,
        }
    }
    (low * high).sqrt()
}
