//! A warning for plans that put tensor parallelism on a slow link, with its cost.

use lockstep_plan::Plan;
use serde::Serialize;

use crate::case::Case;
use crate::cluster::Cluster;
use crate::estimate::{Estimate, Options, estimate};

/// Tensor parallelism on a slow link.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowTensor {
    /// The link that tensor groups use, and its GB/s per rank.
    pub link: String,
    pub gbs: f64,
    /// GB/s per rank of a fast link: the nearest of the cluster, or NVLink.
    pub fast_gbs: f64,
    /// Seconds that a step takes longer than with the fast link.
    pub lost_s: f64,
    pub fix: String,
}

/// GB/s per rank that an all-reduce reaches on the NVLink of an A100. Tensor parallelism was made for it.
const NVLINK_GBS: f64 = 200.0;
/// A link is slow below this fraction of a fast one.
const SLOW: f64 = 0.5;
/// Costs below this fraction of a step are not worth a warning.
const MIN_SHARE: f64 = 0.02;

/// Warns if tensor groups use a slow link, and a step takes noticeably longer because of it.
pub fn slow_tensor(
    plan: &Plan,
    cluster: &Cluster,
    options: &Options,
    found: &Estimate,
) -> Option<SlowTensor> {
    if plan.layout.tensor == 1 || !cluster.has_gpus() {
        return None;
    }
    let case = Case::new(plan, cluster, options);
    let used = case.tensor().link(cluster);
    let rate = |link: usize| cluster.bandwidth(link) * 1e-9;
    let fast_gbs = if used > 0 { rate(0) } else { NVLINK_GBS };
    if rate(used) >= SLOW * fast_gbs {
        return None;
    }
    let mut faster = cluster.clone();
    let scale = fast_gbs / rate(used);
    let link = &mut faster.links[used];
    link.bandwidth_gbs *= scale;
    (link.hop_us, link.start_us) = (cluster.links[0].hop_us, cluster.links[0].start_us);
    // Only tensor communication counts: other axes may use the same link, and should.
    let ideal = estimate(plan, &faster, options).time.tensor;
    let lost_s = found.time.tensor - ideal;
    let span = cluster.links[0].span.unwrap_or(cluster.per_host).min(cluster.per_host);
    let largest = if used > 0 { span } else { 1 };
    let fix = match plan.layout.tensor <= largest {
        // The groups would fit into a host, but another axis was placed there.
        true => "place tensor groups inside hosts: layout.placement = \"pipe,context,data,tensor\""
            .into(),
        false => format!(
            "use layout.tensor <= {largest} with more data (zero = 1 to 3) or pipeline parallelism"
        ),
    };
    (lost_s > MIN_SHARE * found.step_s).then(|| SlowTensor {
        link: cluster.links[used].name.clone(),
        gbs: rate(used),
        fast_gbs,
        lost_s,
        fix,
    })
}

impl std::fmt::Display for SlowTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SlowTensor { link, gbs, fast_gbs, lost_s, fix } = self;
        write!(
            f,
            "tensor parallelism uses {link} ({gbs:.1} GB/s per rank): a step takes {:.1} ms longer than at {fast_gbs:.0} \
             GB/s; {fix}",
            1e3 * lost_s
        )
    }
}
