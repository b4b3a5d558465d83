//! A machine description that reproduces this run: links get the ratio of latency to bandwidth of the run's timeline, if
//! there is one, and are scaled so that the exposed communication is that of the run; then the accelerator is scaled so that
//! the step time is.

use lockstep_plan::Plan;
use lockstep_sim::{Cluster, Estimate, Link, OpClass, Options, estimate};

use super::measured::{Measured, median};

/// A calibrated machine, and the estimate of this run on it.
pub(super) struct Calibrated {
    pub cluster: Cluster,
    pub options: Options,
    pub base: Estimate,
    /// The description was measured on this machine, not assumed.
    pub described: bool,
    /// The links of the machine before they are scaled.
    pub machine_links: Vec<Link>,
    /// Bytes per second that a rank streams from memory, if the machine is described.
    pub stream_rate: Option<f64>,
    /// Bytes that a rank moves per step in operations that are limited by memory bandwidth.
    pub moved: Vec<(OpClass, f64)>,
    /// Step time that the calibration reproduces: that of the run without stragglers, data and checkpoints.
    pub target: f64,
}

/// Steps of a bisection.
const ROUNDS: usize = 40;

pub(super) fn calibrate(plan: &Plan, measured: &Measured, machine: Option<&Cluster>) -> Calibrated {
    let options = Options::default();
    let described = machine.is_some();
    let mut cluster = match machine {
        Some(machine) => machine.clone(),
        None => generic(plan, measured),
    };
    // What the simulator does not model is taken out: it would be mistaken for compute.
    let excess = measured.compute.iter().copied().fold(0.0, f64::max)
        - median(measured.compute.iter().copied());
    let other = median(measured.read.iter().copied()) + excess.max(0.0);
    let target = (measured.step - other).max(0.2 * measured.step);
    let machine_links = cluster.links.clone();
    let shared = |cluster: &Cluster| {
        cluster.shared(plan.ranks, plan.train.threads).accelerator.stream_rate()
    };
    let stream_rate = described.then(|| shared(&cluster));
    // The generic machine has one bandwidth for all of these operations, so their times are proportional to their bytes.
    let plain = generic(plan, measured);
    let rate = shared(&plain);
    let moved = estimate(plan, &plain, &options).computing.into_iter();
    let moved = moved
        .filter(|(class, _)| is_memory_bound(class.name()) && *class != OpClass::Optimizer)
        .map(|(class, seconds)| (class, seconds * rate))
        .collect();
    if plan.ranks > 1 && measured.pure_comm() > 0.0 {
        if let Some(cost) = measured.call_cost {
            cluster = with_latency_share(plan, &cluster, &options, cost.latency_share);
        }
        cluster = with_links(plan, &cluster, &options, measured.pure_comm());
    }
    let cluster = lockstep_sim::calibrate(&cluster, &options, &[(plan, target)]);
    let base = estimate(plan, &cluster, &options);
    Calibrated { cluster, options, base, described, machine_links, stream_rate, moved, target }
}

/// Whether the operations of a class are limited by memory bandwidth.
pub(super) fn is_memory_bound(class: &str) -> bool {
    !matches!(class, "matmul" | "attention" | "loss")
}

/// A CPU host with the measured peak, the cores of this process and the memory of this machine.
fn generic(plan: &Plan, measured: &Measured) -> Cluster {
    let mut cluster = Cluster::built_in("cpu").expect("the built-in cluster exists");
    cluster.per_host = plan.ranks.max(1);
    cluster.cores = Some((plan.ranks * plan.train.threads).max(1));
    if measured.peak_flops > 0.0 {
        let host = measured.peak_flops * plan.ranks as f64 / 1e12;
        let peak = &mut cluster.accelerator.peak;
        let ratio = peak.bf16 / peak.f32;
        (peak.f32, peak.bf16) = match plan.precision.compute {
            lockstep_types::Dtype::Bf16 => (host / ratio, host),
            _ => (host, host * ratio),
        };
    }
    if let Some(gib) = machine_memory_gib() {
        cluster.accelerator.memory_gib = gib;
    }
    cluster
}

/// Memory of this machine.
fn machine_memory_gib() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib / (1 << 20) as f64)
}

/// Factor of the bandwidth with which moving data costs nothing.
const FREE: f64 = 1e9;

/// Scales latency and bandwidth of all links so that latency is this fraction of the predicted communication.
fn with_latency_share(
    plan: &Plan,
    cluster: &Cluster,
    options: &Options,
    latency_share: f64,
) -> Cluster {
    let scaled = |latency: f64, bandwidth: f64| {
        let mut cluster = cluster.clone();
        for link in &mut cluster.links {
            link.start_us *= latency;
            link.hop_us *= latency;
            link.bandwidth_gbs *= bandwidth;
        }
        cluster
    };
    let seconds = |cluster: &Cluster| -> f64 {
        estimate(plan, cluster, options).flows.iter().map(|flow| flow.total()).sum()
    };
    let fixed = seconds(&scaled(1.0, FREE));
    let moving = seconds(&scaled(0.0, 1.0));
    if fixed <= 0.0 || moving <= 0.0 {
        return cluster.clone();
    }
    let total = fixed + moving;
    // A link is never free: the algorithms of collectives are chosen by both.
    let share = latency_share.clamp(1e-3, 1.0 - 1e-3);
    scaled(share * total / fixed, moving / ((1.0 - share) * total))
}

/// Scales all links so that the predicted exposed communication is `seconds`.
fn with_links(plan: &Plan, cluster: &Cluster, options: &Options, seconds: f64) -> Cluster {
    let scaled = |factor: f64| {
        let mut cluster = cluster.clone();
        for link in &mut cluster.links {
            link.bandwidth_gbs *= factor;
            link.hop_us /= factor;
            link.start_us /= factor;
        }
        cluster
    };
    let (mut least, mut most) = (1e-4, 1e4);
    for _ in 0..ROUNDS {
        let middle = f64::sqrt(least * most);
        if estimate(plan, &scaled(middle), options).time.exposed() > seconds {
            least = middle;
        } else {
            most = middle;
        }
    }
    scaled(f64::sqrt(least * most))
}
