//! `lockstep bench step`: whole training steps, where their time goes and what memory they take.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use lockstep_comm::{Op, World};
use lockstep_kernels::{Device, OpClass, Tag};
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Config, Ledger, Plan};
use lockstep_trainer::{Rank, dtype, measure_peak};

use crate::commands::prediction;
use crate::print::print_line;
use crate::run_file::RunFile;
use crate::world::{self, Engine};

/// Training steps: tokens/s, FLOP/s against this machine's matrix multiply, time by operation, memory by
/// what it is for against the plan
///
/// A step is forward, backward, the exchange between ranks, clipping and AdamW.
#[derive(clap::Args)]
pub struct Args {
    /// tiny, small, gpt2, or a run file
    #[arg(long, default_value = "tiny")]
    config: String,
    /// f32 or bf16 [default: f32, or what the run file says]
    #[arg(long)]
    dtype: Option<String>,
    /// Threads of each rank
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// [default: what the layout asks for]
    #[arg(long)]
    ranks: Option<usize>,
    /// A value laid over the configuration's: --set layout.zero=3
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Steps to measure, after two that warm up
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Measure for this many seconds instead, and three steps at least
    #[arg(long)]
    seconds: Option<f64>,
    /// none, selective or full [default: none, or what the run file says]
    #[arg(long)]
    recompute: Option<String>,
    #[arg(long, value_enum, default_value = "shm")]
    engine: Engine,
    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// The named configurations: each rank's micro-batch is the same whatever the number of ranks.
const NAMED: [(&str, &str, usize, usize); 3] =
    [("tiny", "tiny", 128, 16), ("small", "small", 256, 4), ("gpt2", "gpt2-124m", 512, 1)];

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.steps == 0 || args.threads == 0 {
        bail!("--steps and --threads are 1 at least");
    }
    let (file, start) = file(&args)?;
    let size = world::size(&start)?;
    let plan = file.plan(size, size)?;
    prediction::check_trainable(&plan)?;
    let timeout = plan.comm.timeout_s;
    world::run(&start, Duration::try_from_secs_f64(timeout)?, |world| {
        let plan = file.plan(world.size(), world::local_ranks(world))?;
        rank(&args, &file, &plan, world)
    })
}

/// The configuration as a run file, and how many ranks it is for.
fn file(args: &Args) -> anyhow::Result<(RunFile, world::Start)> {
    let mut sets = vec![format!("train.threads={}", args.threads)];
    sets.extend(args.dtype.as_ref().map(|dtype| format!("precision.compute={dtype}")));
    sets.extend(args.recompute.as_ref().map(|how| format!("layout.recompute={how}")));
    sets.extend_from_slice(&args.sets);
    let named = NAMED.iter().find(|(name, ..)| *name == args.config);
    let path = Path::new(&args.config);
    if named.is_none() && path.extension().is_none() {
        bail!(
            "unknown configuration {}; use tiny, small, gpt2 or the path of a run file",
            args.config
        );
    }
    let read = |replicas: usize, sets: &[String]| match named {
        Some((_, preset, seq, batch)) => RunFile::open(Config::parse(
            &format!(
                "name = \"bench\"\n[model]\npreset = \"{preset}\"\n[data]\nseq = {seq}\n\
                 [train]\nmicro_batch = {batch}\nglobal_batch = {}\nsteps = 1000000",
                batch * replicas
            ),
            sets,
        )),
        None => RunFile::read(path, sets),
    };
    let typed = read(1, &sets)?.config;
    let default_ranks = typed.ranks();
    let start = world::Start { engine: args.engine, ranks: args.ranks, default_ranks, logs: None };
    // As many replicas as the other axes leave room for.
    let others = default_ranks / typed.layout.data.unwrap_or(1).max(1);
    let replicas = (world::size(&start)? / others).max(1);
    sets.insert(0, format!("layout.data={replicas}"));
    Ok((read(replicas, &sets)?, start))
}

/// What was measured, as programs read it.
#[derive(serde::Serialize)]
struct Record {
    config: String,
    dtype: String,
    ranks: usize,
    threads: usize,
    steps: usize,
    /// The median of the steps, from which speeds are counted.
    step_ms: f64,
    /// Their mean: what a long run pays for each.
    mean_ms: f64,
    tokens_per_s: f64,
    gflops: f64,
    /// One rank's multiply of 1024³, all ranks at once.
    gemm_peak_gflops: f64,
    mfu: f64,
    /// Share of the step that ranks spent in exchanges that nothing hid, waiting for each other included.
    comm_exposed: f64,
    /// The same of whichever rank spent the least in each step: without waiting for slower ranks.
    comm_exposed_least: f64,
    /// Of the process, as the system counts it; the largest of any rank.
    peak_bytes: u64,
    /// Milliseconds of a step.
    time_ms: Vec<(String, f64)>,
    memory: Vec<Held>,
}

#[derive(serde::Serialize)]
struct Held {
    tag: &'static str,
    planned: Option<usize>,
    peak: usize,
}

fn rank(args: &Args, file: &RunFile, plan: &Plan, world: &World) -> anyhow::Result<()> {
    let device = Device::cpu(plan.train.threads);
    let peak = measure_peak(&device, dtype(plan));
    let mut rank = Rank::new(plan, world, device.clone())?;
    for step in 1..=2 {
        rank.step(&file.source, step)?;
    }
    device.reset_peaks();
    device.meter().switch(true);
    let mut times = Vec::new();
    let mut exchanges = Vec::new();
    for step in 3.. {
        let stepped = rank.step(&file.source, step)?;
        times.push(stepped.time.as_secs_f64());
        exchanges.push(stepped.exposed_comm.as_secs_f64());
        // Ranks agree on when to stop.
        let mut done = [match args.seconds {
            Some(seconds) => times.len() >= 3 && times.iter().sum::<f64>() >= seconds,
            None => times.len() >= args.steps,
        } as i32];
        world.all_reduce(&mut done, Op::Max)?;
        if done[0] == 1 {
            break;
        }
    }
    device.meter().switch(false);
    let mut resident = [resident_peak() as i64];
    world.all_reduce(&mut resident, Op::Max)?;
    // The slowest rank of a step waits for the exchange alone, and for nobody.
    let mut least = exchanges.clone();
    world.all_reduce(&mut least, Op::Min)?;
    // The mean over the ranks: the stages of a pipeline do not wait alike.
    world.all_reduce(&mut exchanges, Op::Mean)?;
    if world.rank() == 0 {
        let exchange = [exchanges, least];
        let record = record(args, plan, &device, &times, &exchange, peak, resident[0] as u64);
        if args.json {
            print_line!("{}", serde_json::to_string(&record)?);
        } else {
            print(&record);
        }
    }
    world.barrier()?;
    Ok(())
}

fn record(
    args: &Args,
    plan: &Plan,
    device: &Device,
    times: &[f64],
    exchange: &[Vec<f64>; 2],
    peak: f64,
    peak_bytes: u64,
) -> Record {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let step = sorted[sorted.len() / 2];
    let total: f64 = times.iter().sum();
    let tokens_per_s = plan.tokens_per_step() as f64 / step;
    let gflops = tokens_per_s * flops_per_token(&plan.model, plan.data.seq).total() / 1e9;
    let per_step = |time: Duration| 1e3 * time.as_secs_f64() / times.len() as f64;
    let mut time_ms: Vec<(String, f64)> = OpClass::ALL
        .iter()
        .map(|operation| (operation.name().to_string(), per_step(device.meter().spent(*operation))))
        .filter(|(_, time)| *time > 0.0)
        .collect();
    let [exchange, least] = exchange.each_ref().map(|spent| spent.iter().sum::<f64>());
    time_ms.push(("exchange".into(), 1e3 * exchange / times.len() as f64));
    let known: f64 = time_ms.iter().map(|(_, time)| time).sum();
    time_ms.push(("rest".into(), (1e3 * total / times.len() as f64 - known).max(0.0)));
    let ledger = Ledger::of(plan, 0);
    let memory = device.memory();
    let planned = |tag| match tag {
        Tag::Parameters => Some(ledger.parameters),
        Tag::Gradients => Some(ledger.gradients),
        Tag::Optimizer => Some(ledger.optimizer),
        Tag::Activations => Some(ledger.activations),
        Tag::Buffers => None,
    };
    Record {
        config: args.config.clone(),
        dtype: dtype(plan).to_string(),
        ranks: plan.ranks,
        threads: plan.train.threads,
        steps: times.len(),
        step_ms: 1e3 * step,
        mean_ms: 1e3 * total / times.len() as f64,
        tokens_per_s,
        gflops,
        gemm_peak_gflops: peak / 1e9,
        mfu: gflops * 1e9 / (peak * plan.ranks as f64),
        comm_exposed: exchange / total,
        comm_exposed_least: least / total,
        peak_bytes,
        time_ms,
        memory: Tag::ALL
            .iter()
            .map(|&tag| Held { tag: tag.name(), planned: planned(tag), peak: memory.of(tag).peak })
            .collect(),
    }
}

fn print(record: &Record) {
    print_line!(
        "{} {}, {} rank(s) × {} thread(s): {:.0} tokens/s, {:.1} ms a step (median of {})",
        record.config,
        record.dtype,
        record.ranks,
        record.threads,
        record.tokens_per_s,
        record.step_ms,
        record.steps
    );
    print_line!(
        "{:.1} GFLOP/s, {:.1}% of {} × {:.1} (matrix multiply of 1024³)",
        record.gflops,
        100.0 * record.mfu,
        record.ranks,
        record.gemm_peak_gflops
    );
    print_line!("\n{:<14} {:>10} {:>7}", "operation", "ms", "share");
    let total: f64 = record.time_ms.iter().map(|(_, time)| time).sum();
    for (name, time) in &record.time_ms {
        print_line!("{name:<14} {time:>10.2} {:>6.1}%", 100.0 * time / total);
    }
    if record.ranks > 1 {
        let slower = total * (record.comm_exposed - record.comm_exposed_least);
        print_line!("{slower:.2} ms of the exchange went by waiting for slower ranks");
    }
    print_line!("\n{:<14} {:>12} {:>12}", "memory (MiB)", "planned", "peak");
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    for held in &record.memory {
        let planned = held.planned.map_or("–".into(), |bytes| format!("{:.2}", mib(bytes)));
        print_line!("{:<14} {planned:>12} {:>12.2}", held.tag, mib(held.peak));
    }
    print_line!("{:<14} {:>12} {:>12.2}", "process", "", mib(record.peak_bytes as usize));
}

/// The most memory that this process ever had in use, in bytes.
fn resident_peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    1024 * kib.unwrap_or(0)
}
