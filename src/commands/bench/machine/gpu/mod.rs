//! The constants of a GPU: rates of its operations and of steps of reference models, fitted to a cluster description.

mod operations;
mod references;

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use lockstep_comm::World;
use lockstep_kernels::{CudaReport, Device, Dtype, OpClass};
use lockstep_sim::{
    Accelerator, Cluster, Curve, Engine, Fitted, GpuMeasurement, Link, MeasuredStep, Options,
    estimate, fit_gpu,
};
use lockstep_trainer::Rank;

use super::TIMEOUT;
use crate::print::print_line;
use crate::world;
use references::Reference;

/// Measures GPU 0 and describes it. The measurements are kept next to `out`, for those who fit them anew.
pub fn measure(out: &Path) -> anyhow::Result<Cluster> {
    let raw = out.with_extension("gpu.json");
    world::run(&super::start(Some(1)), TIMEOUT, |world| {
        let measured = measure_all(world)?;
        Ok(std::fs::write(&raw, serde_json::to_string(&measured)?)?)
    })?;
    let measured: GpuMeasurement = serde_json::from_str(&std::fs::read_to_string(&raw)?)?;
    let report = Device::cuda(0)?.cuda_report().context("GPU 0 is not a CUDA device")?;
    let initial = initial_cluster(&report, &measured)?;
    let fitted = fit_gpu(&initial, &measured).map_err(anyhow::Error::msg)?;
    print(&measured, &fitted);
    Ok(fitted.cluster)
}

fn measure_all(world: &World) -> anyhow::Result<GpuMeasurement> {
    let gpu = Device::cuda(0)?;
    let small = |sizes| steps(world, &gpu, references::small(sizes)?);
    let mut measured = operations::measure(&gpu, [small(TINY)?, small(TINIEST)?])?;
    for sizes in MORE_TOKENS {
        measured.more_tokens.push(small(sizes)?);
    }
    for reference in references::all()? {
        measured.steps.push(steps(world, &gpu, reference)?);
    }
    Ok(measured)
}

/// Layers and sequences of the small models, whose kernels do not fill a GPU.
const TINY: [usize; 2] = [6, 8];
const TINIEST: [usize; 2] = [2, 8];
const MORE_TOKENS: [[usize; 2]; 2] = [[6, 32], [6, 128]];

/// Time of the steps of a reference model in seconds, after the warm-up. A GPU lowers its clock under load.
const SECONDS: [f64; 2] = [0.5, 1.0];
/// Minimum number of steps in each of these times.
const MIN_STEPS: usize = 3;
/// Steps in which operations are metered, which takes time.
const METERED_STEPS: usize = 3;

/// Measures steps of a reference model, first as they are, then by class of operation.
fn steps(world: &World, gpu: &Device, reference: Reference) -> anyhow::Result<MeasuredStep> {
    let Reference { file, plan } = reference;
    gpu.set_tf32(plan.device.tf32);
    let mut rank = Rank::new(&plan, world, gpu.clone())?;
    let mut number = 0;
    let mut step = || {
        number += 1;
        rank.step(&file.source, number)
    };
    let mut mean = 0.0;
    for seconds in SECONDS {
        // The first steps choose algorithms and allocate memory.
        for _ in 0..2 {
            step()?;
        }
        let (start, mut count) = (Instant::now(), 0);
        while count < MIN_STEPS || start.elapsed().as_secs_f64() < seconds {
            step()?;
            count += 1;
        }
        mean = start.elapsed().as_secs_f64() / count as f64;
    }
    gpu.meter().switch(true);
    for _ in 0..METERED_STEPS {
        step()?;
    }
    let spent = |class| gpu.meter().spent(class).as_secs_f64() / METERED_STEPS as f64;
    let by = OpClass::ALL.map(spent);
    gpu.meter().switch(false);
    // The events around each operation take time as well.
    let operations: f64 = by.iter().sum();
    let by = by.map(|seconds| seconds * (mean / operations).min(1.0));
    let rest = (mean - operations).max(0.0);
    Ok(MeasuredStep { plan, step: mean, by, comm: 0.0, waiting: 0.0, rest })
}

/// The description before fitting: peaks of the data sheet if the GPU is known, otherwise of the fastest matmul.
fn initial_cluster(report: &CudaReport, measured: &GpuMeasurement) -> anyhow::Result<Cluster> {
    let fastest = |matmuls: &[lockstep_sim::MeasuredMatmul], compute: Dtype| {
        let rate = |one: &lockstep_sim::MeasuredMatmul| {
            2e-12 * one.dims.iter().product::<usize>() as f64 / one.seconds
        };
        matmuls.iter().filter(|one| one.compute == compute).map(rate).fold(0.0, f64::max)
    };
    let mut cluster = match Cluster::of_gpu(&report.gpu) {
        Some(cluster) => cluster,
        None => {
            let mut accelerator =
                Accelerator::built_in("h100").context("no built-in accelerator h100")?;
            accelerator.peak.f32 = fastest(&measured.matmuls, Dtype::F32);
            accelerator.peak.bf16 = fastest(&measured.matmuls, Dtype::Bf16);
            (accelerator.peak.fp8, accelerator.peak.tf32) =
                (None, Some(fastest(&measured.tf32, Dtype::F32)));
            accelerator.bandwidth_gbs = measured.copy_rate * 1e-9;
            Cluster {
                name: String::new(),
                accelerator,
                per_host: 1,
                ranks: None,
                links: vec![pcie()],
                engine: Engine::Nccl,
                cores: None,
                skew: Curve::default(),
                differs: Vec::new(),
            }
        }
    };
    cluster.name = format!("this machine, {}", report.gpu);
    cluster.accelerator.name = report.gpu.clone();
    cluster.accelerator.memory_gib = report.total_bytes as f64 / (1u64 << 30) as f64;
    cluster.per_host = Device::cuda_count()?.max(1);
    cluster.ranks = Some(cluster.per_host);
    // The ranks of one machine use its innermost link.
    cluster.links.truncate(1);
    cluster.links[0].span = None;
    Ok(cluster)
}

/// The link between GPUs of an unknown machine, until it is measured by `bench machine --cluster`.
fn pcie() -> Link {
    Link {
        name: "PCIe".into(),
        span: None,
        start_us: 30.0,
        hop_us: 5.7,
        bandwidth_gbs: 20.0,
        rails: None,
        oversubscription: 1.0,
    }
}

/// The machine with memory-bound operations at the rate of copies.
fn neutral(cluster: &Cluster) -> Cluster {
    let mut cluster = cluster.clone();
    cluster.accelerator.efficiency = None;
    cluster
}

fn print(measured: &GpuMeasurement, fitted: &Fitted) {
    let gpu = &fitted.cluster.accelerator;
    print_line!(
        "{}: copies {:.0} GB/s in its memory, {:.1} GB/s from and {:.1} GB/s to page-locked host memory; a kernel takes at least {:.1} µs, {:.1} µs to launch",
        gpu.name,
        1e-9 * measured.copy_rate,
        1e-9 * measured.host_rates[0],
        1e-9 * measured.host_rates[1],
        1e6 * measured.kernel,
        1e6 * measured.launch
    );
    let tflops = |flops: f64, seconds: f64| 1e-12 * flops / seconds;
    let all = [("f32", Dtype::F32, &measured.matmuls), ("bf16", Dtype::Bf16, &measured.matmuls)];
    for (name, compute, matmuls) in all.into_iter().chain([("tf32", Dtype::F32, &measured.tf32)]) {
        print_line!("  matrix multiplication in {name}, TFLOP/s:");
        for one in matmuls.iter().filter(|one| one.compute == compute) {
            let [m, k, n] = one.dims;
            print_line!(
                "    ({m}, {k}) × ({k}, {n}){}: {:.1}",
                if one.sums { ", added to f32" } else { "" },
                tflops(2.0 * (m * k * n) as f64, one.seconds)
            );
        }
    }
    print_line!("  attention, forward and backward, TFLOP/s:");
    for one in &measured.attention {
        let flops = one.flops();
        print_line!(
            "    {} head size {}, length {}: {:.1}, {:.1}",
            one.compute,
            one.head_dim,
            one.seq,
            tflops(flops[0], one.seconds[0]),
            tflops(flops[1], one.seconds[1])
        );
    }
    let options = Options::default();
    let rates = |step: &MeasuredStep| {
        let ideal = estimate(&step.plan, &neutral(&fitted.cluster), &options).computing;
        let rate = |(class, seconds): &(OpClass, f64)| {
            format!("{} {:.2}", class.name(), seconds / step.by[*class as usize])
        };
        let memory_bound = |(class, _): &&(OpClass, f64)| {
            !matches!(class, OpClass::Matmul | OpClass::Attention) && step.by[*class as usize] > 0.0
        };
        ideal.iter().filter(memory_bound).map(rate).collect::<Vec<_>>().join(", ")
    };
    print_line!(
        "  steps of reference models, with the speed of memory-bound operations relative to a copy of what they have to move:"
    );
    for (step, (with, without)) in measured.steps.iter().zip(&fitted.steps) {
        print_line!(
            "    {}: {:.2} ms; the fit predicts {:+.1}%, without this step {:+.1}%; {}",
            step.plan.name,
            1e3 * step.step,
            100.0 * (with - 1.0),
            100.0 * (without - 1.0),
            rates(step)
        );
    }
    print_line!(
        "  error of the fit: {:.1}% on average for matrix multiplications",
        100.0 * fitted.matmul_error
    );
    let short = |(tokens, us): &(f64, f64)| format!("{us:.1} µs with {tokens:.0} tokens");
    let short: Vec<String> = gpu.short_kernel_us.0.iter().map(short).collect();
    print_line!(
        "  kernels of a small model take {} on average, and its step {:.0} µs more",
        short.join(", "),
        gpu.step_us
    );
}
