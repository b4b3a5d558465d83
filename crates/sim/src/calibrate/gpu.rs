//! Fits the description of a GPU to measured operations and training steps. Data sheets give the peak of known GPUs, so
//! that MFU is relative to it; everything else is measured.

use lockstep_plan::Dtype;
use serde::{Deserialize, Serialize};

use super::fit::{Fitted, MeasuredMatmul, MeasuredStep, RankSkew, fit_rows, fit_steps};
use crate::cluster::{AttentionRate, AttentionRates, Cluster, Curve, MatmulOverheads};
use crate::estimate::{Options, estimate};

/// Measurements of a GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GpuMeasurement {
    /// Isolated matmuls in f32 and bf16, and in f32 with inputs rounded to TF32.
    pub matmuls: Vec<MeasuredMatmul>,
    pub tf32: Vec<MeasuredMatmul>,
    pub attention: Vec<MeasuredAttention>,
    /// Bytes per second, read plus written, of a copy in device memory.
    pub copy_rate: f64,
    /// Bytes per second between page-locked host memory and the device: to it, and from it.
    pub host_rates: [f64; 2],
    /// Shortest time of a kernel, and time for the host to launch one, in seconds.
    pub kernel: f64,
    pub launch: f64,
    /// Steps that are limited by the device.
    pub steps: Vec<MeasuredStep>,
    /// A step of a model whose kernels are too small to fill the device.
    pub tiny: MeasuredStep,
    /// A step of the same model with fewer layers, which tells the costs of a step from those of a kernel.
    pub tiniest: MeasuredStep,
    /// Steps of `tiny` with more and more tokens.
    pub more_tokens: Vec<MeasuredStep>,
}

/// Causal self-attention of `rows` = sequences × heads.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MeasuredAttention {
    pub compute: Dtype,
    pub rows: usize,
    pub head_dim: usize,
    pub seq: usize,
    /// Forward and deterministic backward.
    pub seconds: [f64; 2],
    /// Backward without determinism.
    pub nondeterministic: f64,
}

impl MeasuredAttention {
    /// FLOPs under the causal mask, forward and backward: two and five products per pair.
    pub fn flops(&self) -> [f64; 2] {
        let pairs = (self.rows * self.seq * self.seq) as f64 / 2.0;
        let forward = 4.0 * pairs * self.head_dim as f64;
        [forward, 2.5 * forward]
    }
}

/// Fits a GPU. `cluster` provides name, peaks, memory and links; everything else is fitted.
pub fn fit_gpu(cluster: &Cluster, measured: &GpuMeasurement) -> Result<Fitted, String> {
    let mut neutral = cluster.clone();
    neutral.skew = Curve::default();
    let device = &mut neutral.accelerator;
    (device.efficiency, device.kernel_gap_us) = (None, 0.0);
    (device.launch_us, device.step_us) = (0.0, 0.0);
    device.short_kernel_us = Curve::default();
    device.kernel_us = 1e6 * measured.kernel;
    device.stream = measured.copy_rate / (device.bandwidth_gbs * 1e9);
    device.host_gbs = Some(measured.host_rates.map(|rate| rate * 1e-9));
    let matmul_error = fit_matmuls(&mut neutral, measured)?;
    neutral.accelerator.attention_rates = attention_rates(&neutral, &measured.attention);
    let finish = |cluster: &mut Cluster| {
        let device = &mut cluster.accelerator;
        // The device is never idle in the steps: the host is ahead of it.
        (device.kernel_gap_us, device.launch_us) = (0.0, 1e6 * measured.launch);
        fit_short_kernels(cluster, measured);
    };
    let fitted = fit_steps(&neutral, &measured.steps, RankSkew::default(), matmul_error, finish)?;
    fitted.cluster.check()?;
    Ok(fitted)
}

/// Fits rate, start time and memory speed of matmuls for all types. Returns the mean relative error.
fn fit_matmuls(cluster: &mut Cluster, measured: &GpuMeasurement) -> Result<f64, String> {
    let device = &mut cluster.accelerator;
    let stream = device.stream_rate();
    let fit_type = |matmuls: Vec<&MeasuredMatmul>, peak: f64| {
        let rows: Vec<_> = matmuls.iter().map(|one| (one.work(stream), one.seconds)).collect();
        let (mut overhead, error) = fit_rows(&rows)?;
        overhead.best /= 1e12 * peak;
        Ok::<_, String>((overhead, error))
    };
    let of = |compute| measured.matmuls.iter().filter(|one| one.compute == compute).collect();
    let (f32, f32_error) = fit_type(of(Dtype::F32), device.peak.f32)?;
    let (bf16, bf16_error) = fit_type(of(Dtype::Bf16), device.peak.bf16)?;
    let tf32_peak = device.peak.tf32.unwrap_or(device.peak.bf16 / 2.0);
    let (tf32, tf32_error) = fit_type(measured.tf32.iter().collect(), tf32_peak)?;
    device.peak.tf32 = Some(tf32_peak);
    let shape = &mut device.matmul;
    (shape.units, shape.tiles) = (1, vec![(1, 1, 1.0)]);
    (shape.best, shape.accumulate, shape.ramp) = (1.0, 1.0, 0.0);
    shape.curve.clear();
    shape.overheads = Some(MatmulOverheads { f32, bf16, tf32: Some(tf32) });
    Ok((f32_error + bf16_error + tf32_error) / 3.0)
}

/// Fractions of the peak that attention reaches.
fn attention_rates(cluster: &Cluster, measured: &[MeasuredAttention]) -> AttentionRates {
    let peak = cluster.accelerator.peak;
    let mut rates = AttentionRates::default();
    for attention in measured {
        let (list, peak) = match attention.compute {
            Dtype::F32 => (&mut rates.f32, peak.f32),
            _ => (&mut rates.bf16, peak.bf16),
        };
        let flops = attention.flops();
        let reached =
            std::array::from_fn(|pass| flops[pass] / attention.seconds[pass] / (1e12 * peak));
        let MeasuredAttention { head_dim, seq, nondeterministic, .. } = *attention;
        let nondeterministic = Some(flops[1] / nondeterministic / (1e12 * peak));
        list.push(AttentionRate { head_dim, seq, reached, nondeterministic });
    }
    rates
}

/// Fits the time of a short kernel to the difference between the tiny models, and the time per step to what remains; then
/// the time of a short kernel to each step with more tokens.
fn fit_short_kernels(cluster: &mut Cluster, measured: &GpuMeasurement) {
    let tokens = |step: &MeasuredStep| (step.plan.train.micro_batch * step.plan.data.seq) as f64;
    let seconds = |[kernel_us, step_us]: [f64; 2], step: &MeasuredStep| {
        let mut cluster = cluster.clone();
        let device = &mut cluster.accelerator;
        device.short_kernel_us = Curve(vec![(tokens(step), kernel_us)]);
        device.step_us = step_us;
        estimate(&step.plan, &cluster, &Options::default()).step_s
    };
    let GpuMeasurement { tiny, tiniest, more_tokens, .. } = measured;
    let more = |kernel_us| seconds([kernel_us, 0.0], tiny) - seconds([kernel_us, 0.0], tiniest);
    let kernel_us = solve(tiny.step - tiniest.step, more);
    let step_us = solve(tiniest.step, |step_us| seconds([kernel_us, step_us], tiniest));
    let others = more_tokens
        .iter()
        .map(|step| (step, solve(step.step, |kernel_us| seconds([kernel_us, step_us], step))));
    let mut short = Curve::default();
    for (step, kernel_us) in std::iter::once((tiny, kernel_us)).chain(others) {
        // With more tokens no kernel becomes faster.
        let least = short.at(tokens(step)).unwrap_or(0.0);
        // Zero: the work of the kernels is all that this model takes.
        if kernel_us.max(least) > 0.0 {
            short.add(tokens(step), kernel_us.max(least));
        }
    }
    (cluster.accelerator.short_kernel_us, cluster.accelerator.step_us) = (short, step_us);
}

/// The number between 0 and 1,000,000 at which a function that does not fall reaches `wanted`; 0 if it exceeds it everywhere.
fn solve(wanted: f64, of: impl Fn(f64) -> f64) -> f64 {
    let (mut least, mut most) = (0.0, 1e6);
    for _ in 0..50 {
        let middle = (least + most) / 2.0;
        if of(middle) < wanted {
            least = middle;
        } else {
            most = middle;
        }
    }
    least
}
