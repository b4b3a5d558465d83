//! Fits the description of a machine to measured matmuls and training steps. Steps are measured by operation class,
//! and each class gets the efficiency that reproduces its time. Implausible values are rejected.

use lockstep_plan::model::Family;
use lockstep_plan::{Dtype, Plan};
use serde::{Deserialize, Serialize};

use super::least;
use crate::case::Case;
use crate::cluster::{Cluster, Curve, Efficiency, MatmulOverhead, MatmulOverheads};
use crate::compute::{ByClass, OpClass, same_in_all_families};
use crate::estimate::{Options, estimate};

/// An isolated matmul of (m, k) by (k, n).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MeasuredMatmul {
    pub dims: [usize; 3],
    pub compute: Dtype,
    /// Whether the result is accumulated into an f32 buffer: a weight gradient.
    pub sums: bool,
    pub seconds: f64,
}

/// Measured times of a step in seconds: means over ranks, medians over steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredStep {
    pub plan: Plan,
    pub step: f64,
    pub by: ByClass,
    /// Communication of the rank that waited the least, and the additional waiting of the others.
    pub comm: f64,
    pub waiting: f64,
    /// Neither compute nor communication. Measured per step, because medians of parts do not add up.
    pub rest: f64,
}

/// Compute time of many steps together, in seconds: mean over ranks, and the excess of the slowest rank.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RankSkew {
    pub computing: f64,
    pub waiting: f64,
}

/// A fitted machine and the quality of the fit.
#[derive(Clone, Debug)]
pub struct Fitted {
    pub cluster: Cluster,
    /// Mean relative error of the matmuls.
    pub matmul_error: f64,
    /// Predicted over measured time of every step: with the full fit, and with a fit that leaves this step out.
    pub steps: Vec<(f64, f64)>,
}

/// Fits a machine to measurements. `cluster` provides memory, bandwidth, cores and number of ranks; everything else is
/// fitted. `together` is the skew of all steps taken as one long step.
pub fn fit(
    cluster: &Cluster,
    matmuls: &[MeasuredMatmul],
    steps: &[MeasuredStep],
    together: RankSkew,
) -> Result<Fitted, String> {
    let Some(first) = steps.first() else { return Err("no steps were measured".into()) };
    let mut neutral = cluster.clone();
    neutral.skew = Curve::default();
    let device = &mut neutral.accelerator;
    (device.efficiency, device.kernel_gap_us, device.launch_us) = (None, 0.0, 0.0);
    device.attention = [(1.0, 0.0); 2];
    let matmul_error = fit_matmuls(&mut neutral, &first.plan, matmuls)?;
    fit_steps(&neutral, steps, together, matmul_error, |_| {})
}

/// Fits the efficiencies to the steps, with matmuls as they were fitted. `finish` completes a fitted cluster.
pub(super) fn fit_steps(
    neutral: &Cluster,
    steps: &[MeasuredStep],
    together: RankSkew,
    matmul_error: f64,
    finish: impl Fn(&mut Cluster),
) -> Result<Fitted, String> {
    let models: Vec<StepModel> =
        steps.iter().map(|measured| StepModel::of(neutral, measured)).collect();
    let with_efficiency = |but: Option<usize>| {
        let steps = models.iter().enumerate().filter(|(number, _)| Some(*number) != but);
        let steps: Vec<_> = steps.map(|(_, model)| model).collect();
        let mut cluster = with_efficiency(neutral, &steps, together)?;
        finish(&mut cluster);
        Ok::<_, String>(cluster)
    };
    let predicted = |cluster: &Cluster, measured: &MeasuredStep| {
        estimate(&measured.plan, cluster, &Options::default()).step_s / measured.step
    };
    let cluster = with_efficiency(None)?;
    let mut quality = Vec::new();
    for (number, measured) in steps.iter().enumerate() {
        quality.push((
            predicted(&cluster, measured),
            predicted(&with_efficiency(Some(number))?, measured),
        ));
    }
    Ok(Fitted { cluster, matmul_error, steps: quality })
}

/// Fits rate, start time and memory speed of matmuls for both types. Returns the mean relative error.
fn fit_matmuls(
    cluster: &mut Cluster,
    plan: &Plan,
    matmuls: &[MeasuredMatmul],
) -> Result<f64, String> {
    let stream = cluster.for_rank(plan.ranks, plan).accelerator.stream_rate();
    let share = cluster.share(plan.ranks, plan.train.threads);
    let (mut off, mut parts) = (0.0, Vec::new());
    for compute in [Dtype::F32, Dtype::Bf16] {
        let of_type = matmuls.iter().filter(|multiply| multiply.compute == compute);
        let rows: Vec<([f64; 4], f64)> =
            of_type.map(|multiply| (multiply.work(stream), multiply.seconds)).collect();
        let (part, error) = fit_rows(&rows)?;
        off += error * rows.len() as f64;
        let peak = match compute {
            Dtype::F32 => &mut cluster.accelerator.peak.f32,
            _ => &mut cluster.accelerator.peak.bf16,
        };
        *peak = 1e-12 * part.best / share;
        parts.push(MatmulOverhead { best: 1.0, ..part });
    }
    let shape = &mut cluster.accelerator.matmul;
    (shape.best, shape.accumulate, shape.ramp) = (1.0, 1.0, 0.0);
    shape.curve.clear();
    shape.overheads = Some(MatmulOverheads { f32: parts[0], bf16: parts[1], tf32: None });
    Ok(off / matmuls.len() as f64)
}

/// Fits the overheads of one type to rows of ([`MeasuredMatmul::work`], seconds), with the FLOP/s as `best`. Also
/// returns the mean relative error.
pub(super) fn fit_rows(rows: &[([f64; 4], f64)]) -> Result<(MatmulOverhead, f64), String> {
    let found = least::weights(rows);
    let [plain, sums, passing, start] = found;
    within("FLOP/s of matmuls", 1.0 / plain, [1e8, 1e16])?;
    within("relative speed of weight gradients", plain / sums, [0.3, 3.0])?;
    let predicted = |work: &[f64; 4]| work.iter().zip(found).map(|(x, w)| x * w).sum::<f64>();
    let off = |(work, measured): &([f64; 4], f64)| (predicted(work) / measured - 1.0).abs();
    let overhead = MatmulOverhead {
        best: 1.0 / plain,
        accumulate: plain / sums,
        start_us: 1e6 * start,
        passes: (passing > 0.0).then_some(1.0 / passing),
    };
    Ok((overhead, rows.iter().map(off).sum::<f64>() / rows.len() as f64))
}

impl MeasuredMatmul {
    /// Parts of its time: plain FLOPs, accumulating FLOPs, seconds of memory traffic, one start.
    pub(super) fn work(&self, stream: f64) -> [f64; 4] {
        let [m, k, n] = self.dims.map(|dim| dim as f64);
        let flops = 2.0 * m * k * n;
        let width = self.compute.bytes() as f64;
        let result = if self.sums { 8.0 } else { width };
        let bytes = width * (m * k + k * n) + result * m * n;
        let [plain, sums] = if self.sums { [0.0, flops] } else { [flops, 0.0] };
        [plain, sums, bytes / stream, 1.0]
    }
}

/// A measured step next to its ideal time without losses.
struct StepModel<'a> {
    measured: &'a MeasuredStep,
    sizes: ByClass,
    ideal: ByClass,
    /// Kernel launches.
    pub kernels: f64,
    /// Seconds of communication at 1 GB/s without latency, and with one second per hop at infinite bandwidth.
    comm: [f64; 2],
}

impl StepModel<'_> {
    fn of<'a>(neutral: &Cluster, measured: &'a MeasuredStep) -> StepModel<'a> {
        let plan = &measured.plan;
        let mut cluster = neutral.clone();
        cluster.accelerator.kernel_gap_us = 1e6;
        let mut priced = |hop_us: f64, gbs: f64| {
            (cluster.links[0].hop_us, cluster.links[0].bandwidth_gbs) = (hop_us, gbs);
            estimate(plan, &cluster, &Options::default())
        };
        let bytes = priced(0.0, 1.0);
        let comm = [bytes.time.data, priced(1e6, 1e30).time.data];
        let mut ideal = ByClass::default();
        bytes.computing.iter().for_each(|(kind, seconds)| ideal[*kind as usize] = *seconds);
        let shared = neutral.for_rank(plan.ranks, plan);
        let options = Options::default();
        let case = Case::new(plan, &shared, &options);
        let sizes = OpClass::ALL.map(|kind| case.size(kind));
        StepModel { measured, sizes, ideal, kernels: bytes.time.host, comm }
    }

    fn computing(&self) -> f64 {
        self.measured.by.iter().sum()
    }

    /// Efficiency reached in an operation class, if the step spent enough time in it.
    fn reached(&self, kind: OpClass) -> Result<Option<Reached>, String> {
        let plan = &self.measured.plan;
        let (ideal, measured) = (self.ideal[kind as usize], self.measured.by[kind as usize]);
        // Too short to measure, and too short to matter.
        if ideal <= 0.0 || measured <= 1e-5 * self.measured.step {
            return Ok(None);
        }
        let what = format!("{} of {}", kind.name(), plan.name);
        within(&what, ideal / measured, bounds(kind))?;
        let (family, size) = (plan.model.family, self.sizes[kind as usize]);
        Ok(Some(Reached { family, size, efficiency: ideal / measured }))
    }
}

/// Efficiency of an operation class in one step.
#[derive(Clone, Copy)]
struct Reached {
    family: Family,
    size: f64,
    efficiency: f64,
}

/// Efficiency by size. Points of about the same size are averaged to reduce noise.
fn joined(mut all: Vec<Reached>) -> Curve {
    all.sort_by(|a, b| a.size.total_cmp(&b.size));
    let near = |a: &Reached, b: &Reached| b.size < SAME_SIZE * a.size;
    let point = |run: &[Reached]| {
        let mean = |of: fn(&Reached) -> f64| {
            (run.iter().map(|reached| of(reached).ln()).sum::<f64>() / run.len() as f64).exp()
        };
        (mean(|reached| reached.size), mean(|reached| reached.efficiency))
    };
    Curve(all.chunk_by(near).map(point).collect())
}

/// Sizes within this factor count as the same.
const SAME_SIZE: f64 = 1.5;

/// The neutral machine with the efficiencies of these steps.
fn with_efficiency(
    neutral: &Cluster,
    steps: &[&StepModel],
    together: RankSkew,
) -> Result<Cluster, String> {
    let mut cluster = neutral.clone();
    let mut efficiency = Efficiency::default();
    for compute in [Dtype::F32, Dtype::Bf16] {
        for kind in OpClass::ALL {
            let mut reached = Vec::new();
            for step in steps.iter().filter(|step| step.measured.plan.precision.compute == compute)
            {
                reached.extend(step.reached(kind)?);
            }
            for family in [Family::Gpt2, Family::Llama, Family::Moe] {
                // Experts multiply in their own way, and only they are routed.
                let with_experts = |family| family == Family::Moe;
                let own = |of: &&Reached| match same_in_all_families(kind) {
                    true if kind == OpClass::Matmul => {
                        with_experts(of.family) == with_experts(family)
                    }
                    true => !with_experts(family),
                    false => of.family == family,
                };
                let own = reached.iter().filter(own).copied().collect();
                *efficiency.of_mut(compute, family).of_mut(kind) = joined(own);
            }
        }
    }
    cluster.accelerator.efficiency = Some(efficiency);
    let of_steps =
        |of: &dyn Fn(&StepModel) -> f64| median(steps.iter().map(|step| of(step)).collect());
    cluster.accelerator.kernel_gap_us = 1e6 * of_steps(&|step| step.measured.rest / step.kernels);
    within("kernel gap in µs", cluster.accelerator.kernel_gap_us, [0.0, 1e4])?;
    if steps[0].measured.plan.ranks > 1 {
        cluster.skew = skew(steps, together)?;
        let rows: Vec<([f64; 2], f64)> =
            steps.iter().map(|step| (step.comm, step.measured.comm)).collect();
        let [per_gbs, hops] = least::weights(&rows);
        let link = &mut cluster.links[0];
        (link.bandwidth_gbs, link.hop_us) = (1.0 / per_gbs, 1e6 * hops);
        within("GB/s of reductions between ranks", link.bandwidth_gbs, [1e-3, 1e4])?;
    }
    Ok(cluster)
}

/// Relative excess of the slowest rank by compute time: averaged over steps of similar length, and over all steps
/// together. At least 1e-6.
fn skew(steps: &[&StepModel], together: RankSkew) -> Result<Curve, String> {
    let of_step = |step: &&StepModel| (step.computing(), step.measured.waiting / step.computing());
    let mut all: Vec<(f64, f64)> = steps.iter().map(of_step).collect();
    if together.computing > 0.0 {
        all.push((together.computing, together.waiting / together.computing));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut curve = Curve::default();
    for similar in all.chunk_by(|a, b| a.0.log10().floor() == b.0.log10().floor()) {
        let mean = |of: &dyn Fn(&(f64, f64)) -> f64| {
            similar.iter().map(of).sum::<f64>() / similar.len() as f64
        };
        let share = mean(&|(_, share)| *share);
        within("waiting for slower ranks relative to compute", share, [0.0, 3.0])?;
        curve.add(mean(&|(seconds, _)| seconds.ln()).exp(), share.max(1e-6));
    }
    Ok(curve)
}

/// Plausible efficiencies. Matmuls are about as fast as in isolation, attention is not faster than the peak, and
/// memory-bound operations may run in caches that are a hundred times faster.
fn bounds(kind: OpClass) -> [f64; 2] {
    match kind {
        OpClass::Matmul => [0.2, 2.0],
        OpClass::Attention => [1e-3, 1.5],
        _ => [1e-3, 1e3],
    }
}

fn within(what: &str, found: f64, [least, most]: [f64; 2]) -> Result<(), String> {
    match (least..=most).contains(&found) {
        true => Ok(()),
        false => Err(format!(
            "{what} is {found:.3e}, expected a value between {least} and {most}; measure again on an idle machine"
        )),
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let (low, high) = (all[(all.len() - 1) / 2], all[all.len() / 2]);
    (low + high) / 2.0
}
