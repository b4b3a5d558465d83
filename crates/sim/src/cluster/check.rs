//! Validation of a cluster description. Reports every mistake, each with its value and what is allowed.

use super::{Accelerator, Cluster, Curve, Deviation, Link, Matmul, MatmulOverheads, OpCurves};

/// Limit of every number, so that sums and products of them stay finite.
const MAX: f64 = 1e12;
/// Smallest speed, bandwidth or memory; times divided by it stay finite.
const MIN: f64 = 1e-9;
/// Limit of ranks, hosts, cores and the like.
const MAX_COUNT: usize = 1 << 24;

/// Mistakes found so far, each with the part of the description that it is in.
struct Mistakes {
    part: String,
    found: Vec<String>,
}

pub(super) fn check(cluster: &Cluster) -> Result<(), String> {
    let mut mistakes = Mistakes { part: String::new(), found: Vec::new() };
    mistakes.count("per_host", cluster.per_host);
    cluster.ranks.iter().for_each(|ranks| mistakes.count("ranks", *ranks));
    cluster.cores.iter().for_each(|cores| mistakes.count("cores", *cores));
    mistakes.curve("skew", &cluster.skew.0);
    mistakes.links(&cluster.links);
    for deviation in &cluster.differs {
        mistakes.deviation(deviation);
    }
    mistakes.accelerator(&cluster.accelerator);
    if cluster.engine.shares_accelerator() && cluster.cores.is_some() {
        mistakes.add(
            "ranks share an accelerator or cores, not both; remove `cores` or `engine`".into(),
        );
    }
    // The number of hosts is known only if the numbers above are valid.
    match mistakes.found.is_empty() {
        true => cluster.ranks.map_or(Ok(()), |ranks| check_size(cluster, ranks)),
        false => Err(mistakes.found.join("\n")),
    }
}

/// Checks that `ranks` ranks exist, and all hosts and ranks that differ.
pub(super) fn check_size(cluster: &Cluster, ranks: usize) -> Result<(), String> {
    if ranks == 0 || ranks > MAX_COUNT {
        return Err(format!("ranks must be between 1 and {MAX_COUNT} (got {ranks})"));
    }
    if let Some(most) = cluster.ranks.filter(|most| *most < ranks) {
        let name = &cluster.name;
        return Err(format!(
            "{ranks} ranks are more than cluster {name} has ({most}); use at most {most}"
        ));
    }
    let all = cluster.ranks.unwrap_or(ranks);
    if cluster.engine.shares_accelerator() && all > cluster.per_host {
        let per_host = cluster.per_host;
        return Err(format!(
            "{all} ranks cannot share one accelerator that per_host={per_host} ranks use; set per_host={all}, or describe \
             links between hosts and another engine"
        ));
    }
    let hosts = all.div_ceil(cluster.per_host);
    let fix = "correct the number, or set `ranks` to the size of the cluster";
    for deviation in &cluster.differs {
        if let Some(host) = deviation.hosts.iter().find(|host| **host >= hosts) {
            return Err(format!(
                "differs: host {host} does not exist: {all} ranks are on hosts 0 to {}; {fix}",
                hosts - 1
            ));
        }
        if let Some(rank) = deviation.ranks.iter().find(|rank| **rank >= all) {
            return Err(format!(
                "differs: rank {rank} does not exist: the ranks are 0 to {}; {fix}",
                all - 1
            ));
        }
    }
    Ok(())
}

impl Mistakes {
    fn add(&mut self, mistake: String) {
        let part = &self.part;
        self.found.push(if part.is_empty() { mistake } else { format!("{part}: {mistake}") });
    }

    /// A number above zero.
    fn positive(&mut self, key: &str, value: f64) {
        if value.is_nan() || value <= 0.0 {
            self.add(format!("{key} must be positive (got {value})"));
        } else if !(MIN..=MAX).contains(&value) {
            self.add(format!("{key} must be between {MIN:e} and {MAX:e} (got {value})"));
        }
    }

    /// Zero or a number above it.
    fn not_negative(&mut self, key: &str, value: f64) {
        if !(0.0..=MAX).contains(&value) {
            self.add(format!("{key} must be between 0 and {MAX:e} (got {value})"));
        }
    }

    /// A number of things of which there is at least one.
    fn count(&mut self, key: &str, value: usize) {
        if value == 0 {
            self.add(format!("{key} must be at least 1 (got 0)"));
        } else if value > MAX_COUNT {
            self.add(format!("{key} must be at most {MAX_COUNT} (got {value})"));
        }
    }

    /// Points of positive sizes, in their order, with positive values.
    fn curve(&mut self, key: &str, points: &[(f64, f64)]) {
        for (size, value) in points {
            self.positive(&format!("{key}: a size"), *size);
            self.positive(&format!("{key}: the value at {size}"), *value);
        }
        if let Some(pair) = points.windows(2).find(|pair| pair[1].0 <= pair[0].0) {
            let (first, second) = (pair[0].0, pair[1].0);
            self.add(format!("{key}: sizes must increase (got {first}, then {second})"));
        }
    }

    fn links(&mut self, links: &[Link]) {
        let Some((last, others)) = links.split_last() else {
            let fix = "describe at least one (without `span`, it connects all ranks)";
            return self.add(format!("no [[links]]; {fix}"));
        };
        if let Some(span) = last.span {
            self.add(format!(
                "the last link, {}, has span={span}; remove its span so that it connects all ranks",
                last.name
            ));
        }
        let mut nearer = 0;
        for link in others {
            match link.span {
                None => self.add(format!(
                    "link {} has no span, but is not the last; set the number of ranks that it connects",
                    link.name
                )),
                Some(span) if span <= nearer || span > MAX_COUNT => self.add(format!(
                    "link {}: span must be above {nearer}, the span of the link before it, and at most {MAX_COUNT} (got {span})",
                    link.name
                )),
                Some(span) => nearer = span,
            }
        }
        for link in links {
            self.part = format!("link {}", link.name);
            self.not_negative("start_us", link.start_us);
            self.not_negative("hop_us", link.hop_us);
            self.positive("bandwidth_gbs", link.bandwidth_gbs);
            link.rails.iter().for_each(|rails| self.count("rails", *rails));
            self.positive("oversubscription", link.oversubscription);
        }
        self.part.clear();
    }

    fn deviation(&mut self, deviation: &Deviation) {
        self.part = "differs".into();
        if deviation.hosts.is_empty() && deviation.ranks.is_empty() {
            self.add("no hosts or ranks; list those that differ, e.g. hosts = [3]".into());
        }
        self.positive("compute", deviation.compute);
        self.positive("link", deviation.link);
        deviation.memory_gib.iter().for_each(|gib| self.positive("memory_gib", *gib));
        self.part.clear();
    }

    fn accelerator(&mut self, accelerator: &Accelerator) {
        self.part = format!("accelerator {}", accelerator.name);
        self.positive("peak.f32", accelerator.peak.f32);
        self.positive("peak.bf16", accelerator.peak.bf16);
        accelerator.peak.fp8.iter().for_each(|fp8| self.positive("peak.fp8", *fp8));
        accelerator.peak.tf32.iter().for_each(|tf32| self.positive("peak.tf32", *tf32));
        self.positive("memory_gib", accelerator.memory_gib);
        self.positive("bandwidth_gbs", accelerator.bandwidth_gbs);
        self.positive("host_link_gbs", accelerator.host_link_gbs);
        self.positive("host_bandwidth_gbs", accelerator.host_bandwidth_gbs);
        self.positive("stream", accelerator.stream);
        self.not_negative("kernel_us", accelerator.kernel_us);
        self.not_negative("launch_us", accelerator.launch_us);
        self.curve("short_kernel_us", &accelerator.short_kernel_us.0);
        self.not_negative("step_us", accelerator.step_us);
        self.not_negative("kernel_gap_us", accelerator.kernel_gap_us);
        self.not_negative("reserve_gib", accelerator.reserve_gib);
        for (fraction, rows) in accelerator.attention {
            self.positive("attention: a fraction of the peak", fraction);
            self.not_negative("attention: a number of rows", rows);
        }
        accelerator.host_gbs.iter().flatten().for_each(|gbs| self.positive("host_gbs", *gbs));
        for rate in accelerator.attention_rates.all() {
            self.count("attention_rates: head_dim", rate.head_dim);
            self.count("attention_rates: seq", rate.seq);
            rate.reached.iter().for_each(|part| self.positive("attention_rates: reached", *part));
            if let Some(backward) = rate.nondeterministic {
                self.positive("attention_rates: nondeterministic", backward);
            }
        }
        self.matmul(&accelerator.matmul);
        if let Some(efficiency) = &accelerator.efficiency {
            for (compute, families) in [("f32", &efficiency.f32), ("bf16", &efficiency.bf16)] {
                self.curves(&format!("efficiency.{compute}.gpt2"), &families.gpt2);
                self.curves(&format!("efficiency.{compute}.llama"), &families.llama);
                self.curves(&format!("efficiency.{compute}.moe"), &families.moe);
            }
        }
        self.part.clear();
    }

    fn matmul(&mut self, matmul: &Matmul) {
        self.count("matmul.units", matmul.units);
        self.positive("matmul.best", matmul.best);
        self.positive("matmul.accumulate", matmul.accumulate);
        self.positive("matmul.fp8", matmul.fp8);
        self.not_negative("matmul.ramp", matmul.ramp);
        matmul.misaligned.iter().for_each(|speed| self.positive("matmul.misaligned", *speed));
        self.curve("matmul.curve", &matmul.curve);
        if matmul.tiles.is_empty() {
            self.add("matmul.tiles is empty; use [[1, 1, 1.0]] for no tiling".into());
        }
        for (rows, columns, efficiency) in &matmul.tiles {
            self.count("matmul.tiles: rows", *rows);
            self.count("matmul.tiles: columns", *columns);
            self.positive("matmul.tiles: efficiency", *efficiency);
        }
        let by_type = |all: &MatmulOverheads| [Some(all.f32), Some(all.bf16), all.tf32];
        for of_type in matmul.overheads.iter().flat_map(by_type).flatten() {
            self.positive("matmul.overheads: best", of_type.best);
            self.positive("matmul.overheads: accumulate", of_type.accumulate);
            self.not_negative("matmul.overheads: start_us", of_type.start_us);
            of_type.passes.iter().for_each(|of| self.positive("matmul.overheads: passes", *of));
        }
    }

    fn curves(&mut self, key: &str, curves: &OpCurves) {
        for class in crate::compute::OpClass::ALL {
            let Curve(points) = curves.of(class);
            self.curve(&format!("{key}.{}", class.name()), points);
        }
    }
}
