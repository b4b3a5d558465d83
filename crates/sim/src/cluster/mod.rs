//! Description of a cluster: its accelerators, its links, and ranks that deviate. Read from TOML or built in. Knows
//! nothing about models.

mod accelerator;
mod attention;
mod check;
mod efficiency;
mod link;
mod sharing;

pub use accelerator::{Accelerator, Matmul, MatmulOverhead, MatmulOverheads, Peak};
pub use attention::{AttentionRate, AttentionRates};
pub use efficiency::{Curve, Efficiency, FamilyCurves, OpCurves};
pub use link::Link;

use lockstep_plan::Environment;
use serde::{Deserialize, Serialize};

const BUILT_IN: &str = include_str!("built_in.toml");

/// A cluster of equal ranks, except for the deviations in `differs`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    pub name: String,
    /// A table, or the name of a built-in accelerator.
    #[serde(deserialize_with = "accelerator::by_name")]
    pub accelerator: Accelerator,
    /// Ranks per host.
    pub per_host: usize,
    /// Total number of ranks, if the description is of a specific machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// Links from closest to farthest; the last connects all ranks.
    pub links: Vec<Link>,
    /// Implementation of the collectives.
    #[serde(default)]
    pub engine: Engine,
    /// Cores per host if ranks compute on the CPU. The accelerator then describes the whole host, and its ranks share
    /// its speed and memory.
    pub cores: Option<usize>,
    /// Extra compute time of the slowest of equal ranks, as a fraction of the compute time, by seconds of compute. Most
    /// random delays average out in a long step.
    #[serde(default)]
    pub skew: Curve,
    /// Ranks that differ from the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differs: Vec<Deviation>,
}

/// Implementation of collectives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// NCCL: rings over all rails, trees for small messages.
    #[default]
    Nccl,
    /// The algorithms of `comm`, priced by their own cost formulas.
    Lockstep,
    /// The ranks of the host are threads that share its accelerator. A collective is one kernel over the buffers of all
    /// members; the link describes the accelerator's memory.
    Shared,
    /// The same for processes, under MPS: members other than the first copy their buffers to and from memory that other
    /// processes can open.
    Staged,
}

/// Ranks that are slower or have less memory than the others.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deviation {
    /// Whole hosts, by number.
    #[serde(default)]
    pub hosts: Vec<usize>,
    /// Ranks, by number.
    #[serde(default)]
    pub ranks: Vec<usize>,
    /// Relative speed of compute and memory.
    #[serde(default = "one")]
    pub compute: f64,
    /// Relative bandwidth of all links.
    #[serde(default = "one")]
    pub link: f64,
    /// Memory, if different from the accelerator's.
    pub memory_gib: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Cluster {
    /// Names of built-in clusters.
    pub fn names() -> Vec<String> {
        tables().into_iter().map(|(name, _)| name).collect()
    }

    /// A built-in cluster: `a100-80`, `h100`, ….
    pub fn built_in(name: &str) -> Option<Cluster> {
        let table = tables().into_iter().find(|(known, _)| known == name)?.1;
        let mut cluster: Cluster = table.try_into().expect("built_in.toml describes clusters");
        cluster.name = name.to_string();
        Some(cluster)
    }

    /// The built-in cluster of a GPU, by the name that its driver reports.
    ///
    /// ```
    /// use lockstep_sim::Cluster;
    /// assert_eq!(Cluster::of_gpu("NVIDIA H200").unwrap().accelerator.name, "H200");
    /// assert_eq!(Cluster::of_gpu("NVIDIA A100-SXM4-80GB").unwrap().accelerator.name, "A100-80");
    /// assert_eq!(Cluster::of_gpu("NVIDIA H100 80GB HBM3").unwrap().accelerator.name, "H100");
    /// assert!(Cluster::of_gpu("NVIDIA GeForce RTX 4090").is_none());
    /// ```
    pub fn of_gpu(name: &str) -> Option<Cluster> {
        let name = name.to_lowercase();
        let words: Vec<&str> = name.split([' ', '-']).collect();
        // Memory sizes are part of the name: 80gb, but also 80.
        let has = |part: &str| words.iter().any(|word| word.trim_end_matches("gb") == part);
        let names = Cluster::names();
        let known = names.iter().filter(|known| known.split('-').all(has));
        Cluster::built_in(known.max_by_key(|known| known.len())?)
    }

    /// A built-in cluster by name, optionally with a number of ranks: `h100-16384`. The error suggests a similar name.
    pub fn named(name: &str) -> Result<Cluster, String> {
        if let Some(cluster) = Cluster::built_in(name) {
            return Ok(cluster);
        }
        let split = name.rsplit_once('-').map(|(kind, ranks)| (kind, ranks.parse::<usize>().ok()));
        let (kind, ranks) = match split {
            Some((kind, Some(ranks))) => (kind, Some(ranks)),
            _ => (name, None),
        };
        if let Some(cluster) = Cluster::built_in(kind) {
            let cluster = Cluster { name: name.into(), ranks, ..cluster };
            return cluster.check().map(|()| cluster).map_err(|why| format!("`{name}`: {why}"));
        }
        let names = Cluster::names();
        // `a100-64` lacks a part of the name, `h10-64` has a mistyped one.
        let starts =
            |name: &&str| name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('-'));
        let known = || names.iter().map(String::as_str);
        let near = known().find(starts).or_else(|| lockstep_plan::config::nearest(kind, known()));
        let meant = near.map_or(String::new(), |near| match ranks {
            Some(ranks) => format!("did you mean `{near}-{ranks}`? "),
            None => format!("did you mean `{near}`? "),
        });
        Err(format!(
            "unknown cluster `{name}`; {meant}use the path of a file, or NAME-RANKS with one of {}",
            names.join(", ")
        ))
    }

    /// Parses and checks a description in TOML.
    pub fn parse(text: &str) -> Result<Cluster, String> {
        let cluster: Cluster = toml::from_str(text).map_err(|error| error.to_string())?;
        cluster.check()?;
        Ok(cluster)
    }

    /// Checks the description. The error lists all mistakes, one per line.
    pub fn check(&self) -> Result<(), String> {
        check::check(self)
    }

    /// Checks that the cluster has `ranks` ranks, and that the hosts and ranks listed in `differs` exist.
    pub fn check_size(&self, ranks: usize) -> Result<(), String> {
        check::check_size(self, ranks)
    }

    /// Whether the accelerators are GPUs and not the cores of a CPU.
    pub fn has_gpus(&self) -> bool {
        self.cores.is_none()
    }

    /// The environment of a plan for `ranks` ranks of this cluster.
    pub fn environment(&self, ranks: usize, data_vocab: Option<usize>) -> Environment {
        Environment {
            ranks,
            local_ranks: self.per_host.min(ranks),
            cores: self.cores.unwrap_or(1),
            offloaded_comm: self.engine == Engine::Nccl,
            gpu: self.has_gpus(),
            data_vocab,
        }
    }

    /// Bytes per second that a rank sends over a link while its neighbours do the same.
    pub fn bandwidth(&self, link: usize) -> f64 {
        self.links[link].bandwidth(self.per_host)
    }

    /// Whether all ranks are equal.
    pub fn even(&self) -> bool {
        self.differs.is_empty()
    }

    /// Relative compute speed, relative link speed, and memory in bytes of a rank.
    pub fn of_rank(&self, rank: usize) -> (f64, f64, f64) {
        let host = rank / self.per_host;
        let mine =
            |differs: &&Deviation| differs.hosts.contains(&host) || differs.ranks.contains(&rank);
        let whole = (1.0, 1.0, self.accelerator.memory());
        self.differs.iter().filter(mine).fold(whole, |(compute, link, memory), differs| {
            let less = differs.memory_gib.map_or(memory, |gib| gib * GIB);
            (compute * differs.compute, link * differs.link, less)
        })
    }

    /// Ranks below `ranks` that differ from the others.
    pub fn differing(&self, ranks: usize) -> Vec<usize> {
        let of_hosts = self.differs.iter().flat_map(|differs| &differs.hosts);
        let on_hosts = of_hosts.flat_map(|host| {
            let first = host.saturating_mul(self.per_host).min(ranks);
            first..first.saturating_add(self.per_host)
        });
        let single = self.differs.iter().flat_map(|differs| differs.ranks.iter().copied());
        let mut all: Vec<usize> = on_hosts.chain(single).filter(|rank| *rank < ranks).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

pub(crate) const GIB: f64 = (1u64 << 30) as f64;

/// The built-in clusters as TOML.
fn tables() -> Vec<(String, toml::Value)> {
    let file: toml::Table = BUILT_IN.parse().expect("built_in.toml is TOML");
    match &file["clusters"] {
        toml::Value::Table(clusters) => clusters.clone().into_iter().collect(),
        _ => Vec::new(),
    }
}
