//! `lockstep bench gemm`: measures the matrix multiplications of a linear layer.

mod cuda;
mod experts;

use anyhow::{Context, bail};
use half::bf16;
use lockstep_kernels::cpu::gemm::{self, Data, DataMut, Epilogue, Gemm, Matrix};
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::{Dtype, Float};
use std::process::ExitCode;
use std::time::Instant;

/// More than any published model has in a layer.
const MOST_EXPERTS: i64 = 1024;

/// Largest size in a shape: products of sizes stay far from overflow.
const LARGEST: usize = 1 << 20;

/// Measure and check the matrix multiplications of a linear layer
///
/// A shape MxNxK is a layer with M tokens, N outputs and K inputs. It has three multiplications: nt computes the output,
/// (M, N) = x·Wᵀ; nn the input gradient, (M, K) = dy·W; tn the weight gradient, (N, K) += dyᵀ·x, always in f32.
#[derive(clap::Args)]
pub struct Args {
    /// Element type: f32 or bf16
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: Dtype,
    /// Layers: TOKENSxOUTPUTSxINPUTS, separated by commas
    #[arg(long, default_value = "1024x1024x1024", value_delimiter = ',', value_parser = shape)]
    shapes: Vec<Shape>,
    /// Multiplications to measure: nt, nn, tn
    #[arg(long, default_value = "nt,nn,tn", value_delimiter = ',')]
    orders: Vec<Order>,
    /// Device: cpu or cuda (the first GPU)
    #[arg(long, value_enum, default_value = "cpu")]
    device: On,
    /// On a GPU, round f32 inputs to TF32
    #[arg(long)]
    tf32: bool,
    /// On a GPU, one weight per expert of a mixture: compare one launch for all experts with one product per expert.
    /// TOKENS are those of all experts
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=MOST_EXPERTS))]
    experts: Option<u32>,
    /// Number of threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Highest instruction set to use: portable, avx2, avx512 or amx [default: the best of this processor]
    #[arg(long)]
    level: Option<Level>,
    /// Measurement time per multiplication in seconds
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Clock: wall time, or the CPU time of the thread, which other programs disturb less
    #[arg(long, default_value = "wall")]
    clock: Clock,
    /// Print one JSON object per multiplication instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum On {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Clock {
    Wall,
    Cpu,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    tokens: usize,
    outputs: usize,
    inputs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    Nt,
    Nn,
    Tn,
}

/// The median is robust against other programs; the best time shows what the kernel can reach.
#[derive(serde::Serialize)]
struct Record {
    order: Order,
    m: usize,
    n: usize,
    k: usize,
    dtype: String,
    threads: usize,
    level: String,
    calls: usize,
    median_us: f64,
    best_us: f64,
    gflops: f64,
    best_gflops: f64,
    wrong: usize,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.tf32 && args.dtype != Dtype::F32 {
        bail!("--tf32 needs --dtype f32");
    }
    match (args.device, args.experts) {
        (On::Cuda, Some(experts)) => return experts::run(&args, experts as usize),
        (On::Cuda, None) => return cuda::run(&args),
        (On::Cpu, Some(_)) => bail!("--experts needs --device cuda"),
        (On::Cpu, None) => {}
    }
    if args.tf32 {
        bail!("--tf32 needs --device cuda");
    }
    let best = Level::of_this_machine();
    let level = args.level.unwrap_or(best);
    if level > best {
        bail!("--level {level:?} is not available: this processor supports up to {best:?}");
    }
    if args.clock == Clock::Cpu && args.threads > 1 {
        bail!(
            "--clock cpu measures one thread only; with --threads {}, use --clock wall",
            args.threads
        );
    }
    if args.threads == 0 {
        bail!("--threads must be at least 1 (got 0)");
    }
    let cpu = Cpu::at(level, args.threads);
    if !args.json {
        println!("{} with {} thread(s), {level:?}", args.dtype, args.threads);
        println!(
            "{:>5} {:>6} {:>6} {:>6} {:>7} {:>12} {:>12} {:>9} {:>9} {:>6}",
            "order", "m", "n", "k", "calls", "median (µs)", "best (µs)", "GFLOP/s", "best", "wrong"
        );
    }
    let mut wrong = 0;
    for &shape in &args.shapes {
        for &order in &args.orders {
            let record = measure(&cpu, &args, shape, order);
            wrong += record.wrong;
            print(&record, args.json)?;
        }
    }
    if wrong > 0 {
        bail!("{wrong} results were wrong");
    }
    Ok(ExitCode::SUCCESS)
}

fn print(record: &Record, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string(record).context("cannot serialize the record")?);
        return Ok(());
    }
    println!(
        "{:>5} {:>6} {:>6} {:>6} {:>7} {:>12.1} {:>12.1} {:>9.1} {:>9.1} {:>6}",
        format!("{:?}", record.order).to_lowercase(),
        record.m,
        record.n,
        record.k,
        record.calls,
        record.median_us,
        record.best_us,
        record.gflops,
        record.best_gflops,
        record.wrong
    );
    Ok(())
}

/// One multiplication and its buffers.
struct Case {
    m: usize,
    n: usize,
    k: usize,
    order: Order,
    a: Values,
    b: Values,
    out: Values,
}

enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

fn measure(cpu: &Cpu, args: &Args, shape: Shape, order: Order) -> Record {
    let mut case = Case::new(shape, order, args.dtype);
    case.multiply(cpu);
    let wrong = case.wrong();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || start.elapsed().as_secs_f64() < args.seconds {
        let before = now(args.clock, start);
        case.multiply(cpu);
        times.push(now(args.clock, start) - before);
    }
    times.sort_by(f64::total_cmp);
    let (median, best) = (times[times.len() / 2], times[0]);
    let work = 2.0 * case.m as f64 * case.n as f64 * case.k as f64 / 1e9;
    Record {
        order,
        m: case.m,
        n: case.n,
        k: case.k,
        dtype: args.dtype.to_string(),
        threads: args.threads,
        level: format!("{:?}", cpu.level).to_lowercase(),
        calls: times.len(),
        median_us: median * 1e6,
        best_us: best * 1e6,
        gflops: work / median,
        best_gflops: work / best,
        wrong,
    }
}

/// Seconds since an arbitrary point in time.
fn now(clock: Clock, start: Instant) -> f64 {
    match clock {
        Clock::Wall => start.elapsed().as_secs_f64(),
        Clock::Cpu => {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the call writes only to `time`.
            let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
            assert_eq!(failed, 0, "clock_gettime works for the thread clock");
            time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
        }
    }
}

/// Dimensions (m, n, k) of one multiplication of a layer.
fn dims(Shape { tokens, outputs, inputs }: Shape, order: Order) -> (usize, usize, usize) {
    match order {
        Order::Nt => (tokens, outputs, inputs),
        Order::Nn => (tokens, inputs, outputs),
        Order::Tn => (outputs, inputs, tokens),
    }
}

impl Case {
    fn new(shape: Shape, order: Order, dtype: Dtype) -> Case {
        let (m, n, k) = dims(shape, order);
        let stored = if order == Order::Tn { Dtype::F32 } else { dtype };
        let (a, b) = (Values::new(dtype, m * k, 7), Values::new(dtype, k * n, 5));
        Case { m, n, k, order, a, b, out: Values::zeros(stored, m * n) }
    }

    fn multiply(&mut self, cpu: &Cpu) {
        let Case { m, n, k, order, .. } = *self;
        let stride = |transposed: bool, rows, cols| if transposed { rows } else { cols };
        let (a, b) = (order == Order::Tn, order == Order::Nt);
        let gemm = Gemm {
            m,
            n,
            k,
            a: Matrix { data: self.a.data(), stride: stride(a, m, k), transposed: a },
            b: Matrix { data: self.b.data(), stride: stride(b, k, n), transposed: b },
            out: match &mut self.out {
                Values::F32(out) => DataMut::F32(out),
                Values::Bf16(out) => DataMut::Bf16(out),
            },
            out_stride: n,
            accumulate: order == Order::Tn,
            scale: 1.0,
            epilogue: Epilogue::default(),
        };
        gemm::run(cpu, gemm);
    }

    /// Number of wrong elements among about 500 of the first result.
    fn wrong(&self) -> usize {
        let (m, n, k) = (self.m, self.n, self.k);
        let indices = (0..m * n).step_by((m * n / 500).max(1));
        let is_wrong = |index: usize| {
            let (i, j) = (index / n, index % n);
            let a = |p| self.a.get(if self.order == Order::Tn { p * m + i } else { i * k + p });
            let b = |p| self.b.get(if self.order == Order::Nt { j * k + p } else { p * n + j });
            let expected: f64 = (0..k).map(|p| f64::from(a(p)) * f64::from(b(p))).sum();
            let rounding = if let Values::Bf16(_) = self.out { 1.0 / 128.0 } else { 1e-5 };
            let error = (f64::from(self.out.get(index)) - expected).abs();
            error > rounding * expected.abs() + 1e-5 * (k as f64).sqrt()
        };
        indices.filter(|index| is_wrong(*index)).count()
    }
}

impl Values {
    /// Pseudo-random numbers between -1 and 1, the same in every run.
    fn new(dtype: Dtype, len: usize, seed: u32) -> Values {
        let mut state = seed;
        let values = (0..len).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        });
        match dtype {
            Dtype::Bf16 => Values::Bf16(values.map(<bf16 as Float>::round_from).collect()),
            _ => Values::F32(values.collect()),
        }
    }

    fn zeros(dtype: Dtype, len: usize) -> Values {
        match dtype {
            Dtype::Bf16 => Values::Bf16(vec![bf16::ZERO; len]),
            _ => Values::F32(vec![0.0; len]),
        }
    }

    fn data(&self) -> Data<'_> {
        match self {
            Values::F32(values) => Data::F32(values),
            Values::Bf16(values) => Data::Bf16(values),
        }
    }

    fn get(&self, index: usize) -> f32 {
        match self {
            Values::F32(values) => values[index],
            Values::Bf16(values) => values[index].as_f32(),
        }
    }
}

fn dtype(name: &str) -> Result<Dtype, String> {
    match name {
        "f32" => Ok(Dtype::F32),
        "bf16" => Ok(Dtype::Bf16),
        _ => Err("use f32 or bf16".into()),
    }
}

/// Parses a shape such as `512x768x3072`.
fn shape(text: &str) -> Result<Shape, String> {
    let sizes: Result<Vec<usize>, _> = text.split('x').map(str::parse).collect();
    match sizes.as_deref() {
        Ok(sizes @ &[tokens, outputs, inputs]) => {
            if !sizes.iter().all(|size| (1..=LARGEST).contains(size)) {
                return Err(format!("{text} is not a shape: sizes are from 1 to {LARGEST}"));
            }
            Ok(Shape { tokens, outputs, inputs })
        }
        _ => Err(format!("{text} is not a shape; use TOKENSxOUTPUTSxINPUTS, e.g. 512x768x3072")),
    }
}
