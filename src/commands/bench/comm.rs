//! `lockstep bench comm`: measures collectives at several sizes.

use super::case::{Case, Measured, measure};
use super::device::{self, DeviceBench};
use super::table;
use crate::world::{self, Engine};
use anyhow::{Context, bail};
use half::{bf16, f16};
use lockstep_comm::{Algo, Collective, Dtype, Op, World};
use std::process::ExitCode;
use std::time::Duration;

/// Measure and check collectives at several sizes, like nccl-tests
///
/// The size S is that of the whole buffer. all_reduce, reduce and broadcast process S bytes per rank; reduce_scatter
/// reads S and writes S/ranks; all_gather reads S/ranks and writes S; all_to_all sends S/ranks to each rank. Algorithm
/// bandwidth is S/time. Bus bandwidth counts the bytes that each link must carry.
#[derive(clap::Args)]
pub struct Args {
    /// Collectives: all_reduce, reduce, reduce_scatter, all_gather, broadcast, gather, scatter, all_to_all, or all
    #[arg(long, default_value = "all_reduce", value_delimiter = ',')]
    op: Vec<String>,
    /// Sizes of the whole buffer in bytes, e.g. 4K, 1M or 1G
    #[arg(long, default_value = "4K,64K,1M,16M,64M,256M", value_delimiter = ',', value_parser = size)]
    sizes: Vec<usize>,
    /// Number of ranks to start on this machine [default: one per core, but at least 2]
    #[arg(long)]
    ranks: Option<usize>,
    /// How ranks run and communicate
    #[arg(long, default_value = "shm")]
    engine: Engine,
    /// Algorithm: direct, ring, tree, halving, two_level or flat [default: the one with the lowest predicted cost]
    #[arg(long)]
    algo: Option<Algo>,
    /// Element type: f32, f64, f16, bf16, i32, i64, u8 or u32
    #[arg(long, default_value = "f32")]
    dtype: Dtype,
    /// Reduction: sum, mean, min, max or product
    #[arg(long, default_value = "sum", value_parser = reduction)]
    reduce: Op,
    /// Memory of the buffers
    #[arg(long, default_value = "ordinary")]
    buffers: Buffers,
    /// Memory of the collectives; with cuda, all engines for device memory that can be used are measured
    #[arg(long, default_value = "cpu")]
    device: Memory,
    /// Measurement time per size in seconds
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Timeout of a collective in seconds
    #[arg(long, default_value_t = 30.0)]
    timeout: f64,
    /// Print one JSON object per size instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Buffers {
    /// Vectors; from 256 KiB on, they are allocated in memory shared by the ranks of a host
    Ordinary,
    /// Memory of the system's allocator, as vectors are in a program without `SharedHeap`
    Private,
    /// Memory that all ranks of a host have mapped (symmetric memory)
    Symmetric,
}

/// Where the buffers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Memory {
    Cpu,
    Cuda,
}

/// The collectives of `--op all`.
const OPS: [Collective; 8] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
];

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let kinds = kinds(&args.op)?;
    let timeout = Duration::try_from_secs_f64(args.timeout).context("--timeout")?;
    let (engine, ranks) = (args.engine, args.ranks);
    let default_ranks = world::default_ranks();
    let start = world::Start { engine, ranks, default_ranks, logs: None };
    world::run(&start, timeout, |world| run_cases(world, &args, &kinds))
}

fn run_cases(world: &World, args: &Args, kinds: &[Collective]) -> anyhow::Result<()> {
    if args.device == Memory::Cuda {
        let bench = DeviceBench {
            kinds,
            sizes: &args.sizes,
            dtype: args.dtype,
            op: args.reduce,
            seconds: args.seconds,
            engine: args.engine.name(),
            processes: args.engine != Engine::Threads,
            json: args.json,
        };
        return device::run(world, &bench);
    }
    let first = world.rank() == 0;
    if first && !args.json {
        table::print_header(world, args.engine.name(), args.dtype, args.buffers);
    }
    let mut wrong = 0;
    for &kind in kinds {
        for &bytes in &args.sizes {
            let case = Case {
                kind,
                bytes,
                op: args.reduce,
                algo: args.algo,
                buffers: args.buffers,
                seconds: args.seconds,
            };
            let measured = measure_dtype(world, &case, args.dtype)
                .with_context(|| format!("{} of {bytes} bytes", kind.name()))?;
            wrong += measured.wrong;
            if first {
                table::print_row(&case, &measured, args.engine.name(), args.dtype, args.json);
            }
        }
    }
    if wrong > 0 {
        bail!("{wrong} results were wrong");
    }
    Ok(())
}

fn measure_dtype(world: &World, case: &Case, dtype: Dtype) -> lockstep_comm::Result<Measured> {
    match dtype {
        Dtype::F32 => measure::<f32>(world, case),
        Dtype::F64 => measure::<f64>(world, case),
        Dtype::F16 => measure::<f16>(world, case),
        Dtype::Bf16 => measure::<bf16>(world, case),
        Dtype::I32 => measure::<i32>(world, case),
        Dtype::I64 => measure::<i64>(world, case),
        Dtype::U8 => measure::<u8>(world, case),
        Dtype::U32 => measure::<u32>(world, case),
    }
}

fn kinds(names: &[String]) -> anyhow::Result<Vec<Collective>> {
    let mut kinds = Vec::new();
    for name in names {
        match OPS.into_iter().find(|k| k.name() == name) {
            Some(kind) => kinds.push(kind),
            None if name == "all" => kinds.extend(OPS),
            None => {
                let known: Vec<_> = OPS.iter().map(|k| k.name()).collect();
                bail!("unknown operation {name}; use {} or all", known.join(", "));
            }
        }
    }
    Ok(kinds)
}

fn reduction(name: &str) -> Result<Op, String> {
    Op::ALL
        .into_iter()
        .find(|op| op.name() == name)
        .ok_or_else(|| "use sum, mean, min, max or product".into())
}

/// `4K` → 4096.
fn size(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.trim_end_matches("iB").to_uppercase() {
        t if t.ends_with('K') => (t, 10),
        t if t.ends_with('M') => (t, 20),
        t if t.ends_with('G') => (t, 30),
        t => (t, 0),
    };
    let number: usize = digits
        .trim_end_matches(['K', 'M', 'G'])
        .parse()
        .map_err(|_| format!("{text} is not a size; use e.g. 4096, 4K, 16M or 1G"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too large"))
}
