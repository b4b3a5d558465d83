//! The multiplications of a linear layer on a GPU, next to the peak of its data sheet.

use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_kernels::{Device, Dtype, Matmul, RandomKey, Tag, Tensor};
use lockstep_sim::Cluster;

use super::{Args, Order, Shape};

#[derive(serde::Serialize)]
struct Record {
    order: Order,
    m: usize,
    n: usize,
    k: usize,
    dtype: String,
    tf32: bool,
    gpu: String,
    calls: usize,
    /// Mean time of a call in microseconds, measured by events of the GPU.
    mean_us: f64,
    tflops: f64,
    /// TFLOP/s of the data sheet, if the GPU is known.
    peak_tflops: Option<f64>,
    wrong: usize,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let gpu = Device::cuda(0)?;
    gpu.set_tf32(args.tf32);
    let name = gpu.cuda_report().context("GPU 0 is not a CUDA device")?.gpu;
    let peak = Cluster::of_gpu(&name).map(|cluster| cluster.accelerator.peak);
    let peak = peak.map(|peak| match (args.dtype, args.tf32) {
        (Dtype::Bf16, _) => peak.bf16,
        (_, true) => peak.tf32.unwrap_or(peak.bf16 / 2.0),
        (_, false) => peak.f32,
    });
    if !args.json {
        println!("{}{} on {name}", args.dtype, if args.tf32 { " as TF32" } else { "" });
        println!(
            "{:>5} {:>6} {:>6} {:>6} {:>7} {:>12} {:>9} {:>8} {:>6}",
            "order", "m", "n", "k", "calls", "mean (µs)", "TFLOP/s", "of peak", "wrong"
        );
    }
    let mut wrong = 0;
    for &shape in &args.shapes {
        for &order in &args.orders {
            let (dtype, tf32, gpu_name) = (args.dtype.to_string(), args.tf32, name.clone());
            let case = Case::new(&gpu, shape, order, args.dtype);
            let [calls, mean_us] = case.time(&gpu, args.seconds);
            let tflops = 2e-6 * (case.m * case.n * case.k) as f64 / mean_us;
            let found = case.wrong(&gpu, args.tf32);
            wrong += found;
            print(
                &Record {
                    order,
                    m: case.m,
                    n: case.n,
                    k: case.k,
                    dtype,
                    tf32,
                    gpu: gpu_name,
                    calls: calls as usize,
                    mean_us,
                    tflops,
                    peak_tflops: peak,
                    wrong: found,
                },
                args.json,
            )?;
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
    let of_peak = record
        .peak_tflops
        .map_or("–".into(), |peak| format!("{:.1}%", 100.0 * record.tflops / peak));
    println!(
        "{:>5} {:>6} {:>6} {:>6} {:>7} {:>12.1} {:>9.1} {of_peak:>8} {:>6}",
        format!("{:?}", record.order).to_lowercase(),
        record.m,
        record.n,
        record.k,
        record.calls,
        record.mean_us,
        record.tflops,
        record.wrong
    );
    Ok(())
}

/// One multiplication, with random operands.
struct Case {
    m: usize,
    n: usize,
    k: usize,
    order: Order,
    a: Tensor,
    b: Tensor,
    stored: Dtype,
}

impl Case {
    fn new(gpu: &Device, shape: Shape, order: Order, dtype: Dtype) -> Case {
        let (m, n, k) = super::dims(shape, order);
        let random = |rows, cols, stream| {
            let mut tensor = gpu.empty(rows, cols, dtype, Tag::Buffers);
            gpu.normal(tensor.view_mut(), RandomKey { seed: 0, stream }, 0, 1.0);
            tensor
        };
        let a = if order == Order::Tn { random(k, m, 0) } else { random(m, k, 0) };
        let b = if order == Order::Nt { random(n, k, 1) } else { random(k, n, 1) };
        let stored = if order == Order::Tn { Dtype::F32 } else { dtype };
        Case { m, n, k, order, a, b, stored }
    }

    fn out(&self, gpu: &Device) -> Tensor {
        gpu.zeros(self.m, self.n, self.stored, Tag::Buffers)
    }

    fn multiply(&self, gpu: &Device, out: &mut Tensor) {
        let (a, b, out) = (self.a.view(), self.b.view(), out.view_mut());
        gpu.matmul(match self.order {
            Order::Nt => Matmul::linear(a, b, out),
            Order::Nn => Matmul::linear_dx(a, b, out),
            Order::Tn => Matmul { accumulate: true, ..Matmul::linear_dw(a, b, out) },
        });
    }

    /// Number of calls that fill the time, and microseconds per call.
    fn time(&self, gpu: &Device, seconds: f64) -> [f64; 2] {
        let mut out = self.out(gpu);
        let mut run = |calls: f64| {
            let start = gpu.record();
            (0..calls as usize).for_each(|_| self.multiply(gpu, &mut out));
            gpu.record().elapsed_since(&start).as_secs_f64() / calls
        };
        // The first call chooses an algorithm.
        run(1.0);
        let calls = (seconds / run(3.0)).clamp(5.0, 1e5).floor();
        [calls, 1e6 * run(calls)]
    }

    /// Number of wrong elements among about 500 of one result.
    fn wrong(&self, gpu: &Device, tf32: bool) -> usize {
        let mut out = self.out(gpu);
        self.multiply(gpu, &mut out);
        let read = |tensor: &Tensor| {
            let mut wide = gpu.empty(tensor.rows(), tensor.cols(), Dtype::F32, Tag::Buffers);
            gpu.cast(tensor.view(), wide.view_mut());
            gpu.to_vec::<f32>(wide.view())
        };
        let (a, b, out) = (read(&self.a), read(&self.b), read(&out));
        let (m, n, k) = (self.m, self.n, self.k);
        let expected = |row: usize, col: usize| -> f64 {
            let product = |i: usize| {
                let a = if self.order == Order::Tn { a[i * m + row] } else { a[row * k + i] };
                let b = if self.order == Order::Nt { b[col * k + i] } else { b[i * n + col] };
                f64::from(a) * f64::from(b)
            };
            (0..k).map(product).sum()
        };
        // Tensor cores add 16 products at a time and cut off the bits below those of f32, of a sum of about √k. Inputs of
        // TF32 have 10 bits; a result in bf16 has 8.
        let input = match (tf32, self.a.dtype()) {
            (true, _) => 2e-3,
            (false, Dtype::Bf16) => (k as f64 / 16.0 * 2f64.powi(-22)).clamp(1e-5, 1e-3),
            (false, _) => 1e-5,
        };
        let rounding = if self.stored == Dtype::Bf16 { 1.0 / 128.0 } else { 1e-5 };
        let is_wrong = |index: &usize| {
            let expected = expected(index / n, index % n);
            let error = (f64::from(out[*index]) - expected).abs();
            error > rounding * expected.abs() + input * (k as f64).sqrt()
        };
        (0..m * n).step_by((m * n / 500).max(1)).filter(is_wrong).count()
    }
}
