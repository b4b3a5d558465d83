//! A machine whose cores compute, from single multiplies and whole steps that were measured on it. A step is a sum of
//! kinds of work, each of which was seen by itself: every kind gets the pace at which what it has to do takes as long
//! as it did. What makes no physical sense is refused.

use lockstep_plan::model::Family;
use lockstep_plan::{Dtype, Plan};
use serde::{Deserialize, Serialize};

use super::least;
use crate::case::Case;
use crate::cluster::{Cluster, Curve, Efficiency, MatmulOverhead, MatmulOverheads};
use crate::compute::{ByClass, OpClass, same_in_all_families};
use crate::estimate::{Options, estimate};

/// A multiply of (m, k) by (k, n), by itself.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MeasuredMatmul {
    pub dims: [usize; 3],
    pub compute: Dtype,
    /// Added to what is there in f32: the gradient of a weight.
    pub sums: bool,
    pub seconds: f64,
}

/// What a step of a plan spent, in seconds: means over the ranks, medians over steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredStep {
    pub plan: Plan,
    pub step: f64,
    pub by: ByClass,
    /// Exchanges of the rank that waited the least, and what the others waited more.
    pub exchange: f64,
    pub waiting: f64,
    /// What is neither computing nor exchanging, taken step by step: medians of parts do not add up to that of the whole.
    pub rest: f64,
}

/// What ranks computed of many steps together, in seconds: the mean of them, and how much more the slowest did.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RankSkew {
    pub computing: f64,
    pub waiting: f64,
}

/// A machine as it was measured, and how well that went.
#[derive(Clone, Debug)]
pub struct Fitted {
    pub cluster: Cluster,
    /// By how much multiplies are off, on average.
    pub multiplies: f64,
    /// Predicted over measured, of every step that was measured; and the same by a machine that has not seen that step.
    pub steps: Vec<(f64, f64)>,
}

/// The machine with which multiplies and steps take as long as they did. `cluster` has its memory, bandwidth, cores and
/// number of ranks; the rest of it is found. `together`: of steps as if they were one long one.
pub fn fit(
    cluster: &Cluster,
    multiplies: &[MeasuredMatmul],
    steps: &[MeasuredStep],
    together: RankSkew,
) -> Result<Fitted, String> {
    let Some(first) = steps.first() else { return Err("no steps were measured".into()) };
    let mut neutral = cluster.clone();
    neutral.skew = Curve::default();
    let device = &mut neutral.accelerator;
    (device.efficiency, device.kernel_gap_us, device.launch_us) = (None, 0.0, 0.0);
    device.attention = [(1.0, 0.0); 2];
    let off = fit_multiplies(&mut neutral, &first.plan, multiplies)?;
    let seen: Vec<Seen> = steps.iter().map(|spent| Seen::of(&neutral, spent)).collect();
    let paced = |but: Option<usize>| {
        let steps = seen.iter().enumerate().filter(|(number, _)| Some(*number) != but);
        paced(&neutral, &steps.map(|(_, seen)| seen).collect::<Vec<_>>(), together)
    };
    let predicted = |cluster: &Cluster, spent: &MeasuredStep| {
        estimate(&spent.plan, cluster, &Options::default()).step_s / spent.step
    };
    let cluster = paced(None)?;
    let mut quality = Vec::new();
    for (number, spent) in steps.iter().enumerate() {
        quality.push((predicted(&cluster, spent), predicted(&paced(Some(number))?, spent)));
    }
    Ok(Fitted { cluster, multiplies: off, steps: quality })
}

/// Rates, starts and passes of multiplies in either type; by how much they are off on average.
fn fit_multiplies(
    cluster: &mut Cluster,
    plan: &Plan,
    multiplies: &[MeasuredMatmul],
) -> Result<f64, String> {
    let stream = cluster.shared(plan.ranks, plan.train.threads).accelerator.stream_rate();
    let share = cluster.share(plan.ranks, plan.train.threads);
    let (mut off, mut parts) = (0.0, Vec::new());
    for compute in [Dtype::F32, Dtype::Bf16] {
        let of_type = multiplies.iter().filter(|multiply| multiply.compute == compute);
        let rows: Vec<([f64; 4], f64)> =
            of_type.map(|multiply| (multiply.work(stream), multiply.seconds)).collect();
        let found = least::weights(&rows);
        let [plain, sums, passing, start] = found;
        within("operations per second of a multiply", 1.0 / plain, [1e8, 1e16])?;
        within("speed of weight gradients, of other multiplies,", plain / sums, [0.3, 3.0])?;
        let told = |work: &[f64; 4]| work.iter().zip(found).map(|(x, w)| x * w).sum::<f64>();
        off += rows.iter().map(|(work, measured)| (told(work) / measured - 1.0).abs()).sum::<f64>();
        let peak = match compute {
            Dtype::F32 => &mut cluster.accelerator.peak.f32,
            _ => &mut cluster.accelerator.peak.bf16,
        };
        *peak = 1e-12 / plain / share;
        let passes = (passing > 0.0).then_some(1.0 / passing);
        parts.push(MatmulOverhead { accumulate: plain / sums, start_us: 1e6 * start, passes });
    }
    let shape = &mut cluster.accelerator.matmul;
    (shape.best, shape.accumulate, shape.ramp) = (1.0, 1.0, 0.0);
    shape.curve.clear();
    shape.overheads = Some(MatmulOverheads { f32: parts[0], bf16: parts[1] });
    Ok(off / multiplies.len() as f64)
}

impl MeasuredMatmul {
    /// What it does: operations, those that add to what is there, seconds of passing memory, and beginning once.
    fn work(&self, stream: f64) -> [f64; 4] {
        let [m, k, n] = self.dims.map(|dim| dim as f64);
        let flops = 2.0 * m * k * n;
        let width = self.compute.bytes() as f64;
        let result = if self.sums { 8.0 } else { width };
        let bytes = width * (m * k + k * n) + result * m * n;
        let [plain, sums] = if self.sums { [0.0, flops] } else { [flops, 0.0] };
        [plain, sums, bytes / stream, 1.0]
    }
}

/// A step that was measured, beside what it would be where nothing was lost.
struct Seen<'a> {
    spent: &'a MeasuredStep,
    sizes: ByClass,
    ideal: ByClass,
    /// Kernels, and pieces in which gradients go.
    kernels: f64,
    /// Seconds of exchanges at 1 GB/s without latency, and at no time for bytes with a second for each hop.
    exchange: [f64; 2],
}

impl Seen<'_> {
    fn of<'a>(neutral: &Cluster, spent: &'a MeasuredStep) -> Seen<'a> {
        let plan = &spent.plan;
        let mut cluster = neutral.clone();
        cluster.accelerator.kernel_gap_us = 1e6;
        let mut priced = |hop_us: f64, gbs: f64| {
            (cluster.links[0].hop_us, cluster.links[0].bandwidth_gbs) = (hop_us, gbs);
            estimate(plan, &cluster, &Options::default())
        };
        let bytes = priced(0.0, 1.0);
        let exchange = [bytes.time.data, priced(1e6, 1e30).time.data];
        let mut ideal = ByClass::default();
        bytes.computing.iter().for_each(|(kind, seconds)| ideal[*kind as usize] = *seconds);
        let shared = neutral.shared(plan.ranks, plan.train.threads);
        let options = Options::default();
        let case = Case::new(plan, &shared, &options);
        let sizes = OpClass::ALL.map(|kind| case.size(kind));
        Seen { spent, sizes, ideal, kernels: bytes.time.host, exchange }
    }

    fn computing(&self) -> f64 {
        self.spent.by.iter().sum()
    }

    /// What it reached of the ideal in a kind of work, if it did enough of it.
    fn reached(&self, kind: OpClass) -> Result<Option<Reached>, String> {
        let plan = &self.spent.plan;
        let (ideal, spent) = (self.ideal[kind as usize], self.spent.by[kind as usize]);
        // What is too short for a clock is too short to matter, and gets no pace of its own.
        if ideal <= 0.0 || spent <= 1e-5 * self.spent.step {
            return Ok(None);
        }
        let what = format!("{} of {}", kind.name(), plan.name);
        within(&what, ideal / spent, bounds(kind))?;
        let (family, size) = (plan.model.family, self.sizes[kind as usize]);
        Ok(Some(Reached { family, size, pace: ideal / spent }))
    }
}

/// The pace of a kind of work in one step.
#[derive(Clone, Copy)]
struct Reached {
    family: Family,
    size: f64,
    pace: f64,
}

/// Efficiency by size. Those of about one size are one point, so that chance counts less.
fn joined(mut all: Vec<Reached>) -> Curve {
    all.sort_by(|a, b| a.size.total_cmp(&b.size));
    let near = |a: &Reached, b: &Reached| b.size < SAME_SIZE * a.size;
    let point = |run: &[Reached]| {
        let mean = |of: fn(&Reached) -> f64| {
            (run.iter().map(|reached| of(reached).ln()).sum::<f64>() / run.len() as f64).exp()
        };
        (mean(|reached| reached.size), mean(|reached| reached.pace))
    };
    Curve(all.chunk_by(near).map(point).collect())
}

/// Up to which factor sizes are about the same.
const SAME_SIZE: f64 = 1.5;

/// The neutral machine with the paces of these steps.
fn paced(neutral: &Cluster, steps: &[&Seen], together: RankSkew) -> Result<Cluster, String> {
    let mut cluster = neutral.clone();
    let mut efficiency = Efficiency::default();
    for compute in [Dtype::F32, Dtype::Bf16] {
        for kind in OpClass::ALL {
            let mut reached = Vec::new();
            for seen in steps.iter().filter(|seen| seen.spent.plan.precision.compute == compute) {
                reached.extend(seen.reached(kind)?);
            }
            for family in [Family::Gpt2, Family::Llama] {
                let own = |of: &&Reached| same_in_all_families(kind) || of.family == family;
                let own = reached.iter().filter(own).copied().collect();
                *efficiency.of_mut(compute, family).of_mut(kind) = joined(own);
            }
        }
    }
    cluster.accelerator.efficiency = Some(efficiency);
    let of_steps = |of: &dyn Fn(&Seen) -> f64| median(steps.iter().map(|seen| of(seen)).collect());
    cluster.accelerator.kernel_gap_us = 1e6 * of_steps(&|seen| seen.spent.rest / seen.kernels);
    within("µs between two operations", cluster.accelerator.kernel_gap_us, [0.0, 1e4])?;
    if steps[0].spent.plan.ranks > 1 {
        cluster.skew = skew(steps, together)?;
        let rows: Vec<([f64; 2], f64)> =
            steps.iter().map(|seen| (seen.exchange, seen.spent.exchange)).collect();
        let [per_gbs, hops] = least::weights(&rows);
        let link = &mut cluster.links[0];
        (link.bandwidth_gbs, link.hop_us) = (1.0 / per_gbs, 1e6 * hops);
        within("GB/s of sums between ranks", link.bandwidth_gbs, [1e-3, 1e4])?;
    }
    Ok(cluster)
}

/// How much longer the slowest took, of steps that are about as long, and of all together. Where nobody was slower, next
/// to nothing.
fn skew(steps: &[&Seen], together: RankSkew) -> Result<Curve, String> {
    let of_step = |seen: &&Seen| (seen.computing(), seen.spent.waiting / seen.computing());
    let mut all: Vec<(f64, f64)> = steps.iter().map(of_step).collect();
    if together.computing > 0.0 {
        all.push((together.computing, together.waiting / together.computing));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut curve = Curve::default();
    for alike in all.chunk_by(|a, b| a.0.log10().floor() == b.0.log10().floor()) {
        let mean = |of: &dyn Fn(&(f64, f64)) -> f64| {
            alike.iter().map(of).sum::<f64>() / alike.len() as f64
        };
        let share = mean(&|(_, share)| *share);
        within("waiting for slower ranks, of the computing,", share, [0.0, 3.0])?;
        curve.add(mean(&|(seconds, _)| seconds.ln()).exp(), share.max(1e-6));
    }
    Ok(curve)
}

/// Between which a kind's pace can be: multiplies among others are about as fast as by themselves, attention is no
/// faster than the peak, and passes over memory may be in a cache that is a hundred times faster.
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
        false => {
            Err(format!("{what} came to {found:.3e}, which is not between {least} and {most}"))
        }
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let (low, high) = (all[(all.len() - 1) / 2], all[all.len() / 2]);
    (low + high) / 2.0
}
