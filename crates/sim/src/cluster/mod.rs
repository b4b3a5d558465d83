//! The machines that a plan is priced on: what one accelerator does, how ranks reach each other, and what of it
//! is not as the rest. Read from TOML, or built in. Knows nothing of models.

mod accelerator;
mod efficiency;
mod link;

pub use accelerator::{Accelerator, Matmul, MatmulOverhead, MatmulOverheads, Peak};
pub use efficiency::{Curve, Efficiency, FamilyCurves, OpCurves};
pub use link::Link;

use std::borrow::Cow;

use lockstep_plan::Environment;
use serde::{Deserialize, Serialize};

const BUILT_IN: &str = include_str!("built_in.toml");

/// Machines that are all alike, but for those that differ.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    pub name: String,
    /// In TOML also the name of a built-in one.
    #[serde(deserialize_with = "accelerator::by_name")]
    pub accelerator: Accelerator,
    /// Ranks of a host.
    pub per_host: usize,
    /// Ranks of all hosts, where the description is of a certain machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<usize>,
    /// From the closest to the farthest; the last reaches everybody.
    pub links: Vec<Link>,
    /// Whose collectives run on them.
    #[serde(default)]
    pub engine: Engine,
    /// Cores of a host, where ranks compute on them: the accelerator is then all of them together, and ranks share it
    /// and its memory.
    pub cores: Option<usize>,
    /// Of what a rank computes in a step, how much longer the slowest takes whom all wait for, where ranks that are
    /// alike do not come alike: by the seconds that it computes. Most of what holds up one and then another evens out
    /// in a long step.
    #[serde(default)]
    pub skew: Curve,
    /// Ranks that are not as the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differs: Vec<Deviation>,
}

/// Whose collectives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Rings over all rails, trees for what is small.
    #[default]
    Nccl,
    /// `comm`'s own, by the formulas beside its algorithms.
    Lockstep,
}

/// Ranks that are slower, or have less memory, than the rest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deviation {
    /// Whole hosts, by number.
    #[serde(default)]
    pub hosts: Vec<usize>,
    /// Ranks, by number.
    #[serde(default)]
    pub ranks: Vec<usize>,
    /// Speed of their arithmetic and memory, of the others'.
    #[serde(default = "one")]
    pub compute: f64,
    /// Bandwidth of all their links, of the others'.
    #[serde(default = "one")]
    pub link: f64,
    /// Memory, where it is not the accelerator's.
    pub memory_gib: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Cluster {
    /// Names that [`Cluster::built_in`] knows.
    pub fn names() -> Vec<String> {
        tables().into_iter().map(|(name, _)| name).collect()
    }

    /// A cluster that everybody has: `a100-80`, `h100`, ….
    pub fn built_in(name: &str) -> Option<Cluster> {
        let table = tables().into_iter().find(|(known, _)| known == name)?.1;
        let mut cluster: Cluster = table.try_into().expect("built_in.toml describes clusters");
        cluster.name = name.to_string();
        Some(cluster)
    }

    /// A built-in one by its name, or with a number of ranks behind it: `h100-16384`. What is unknown is told with
    /// what it was likely meant to be.
    pub fn named(name: &str) -> Result<Cluster, String> {
        if let Some(cluster) = Cluster::built_in(name) {
            return Ok(cluster);
        }
        let split = name.rsplit_once('-').map(|(kind, ranks)| (kind, ranks.parse::<usize>().ok()));
        let (kind, ranks) = match split {
            Some((kind, Some(ranks))) => (kind, Some(ranks)),
            _ => (name, None),
        };
        let found = Cluster::built_in(kind).filter(|_| ranks != Some(0));
        found.map(|cluster| Cluster { name: name.into(), ranks, ..cluster }).ok_or_else(|| {
            let names = Cluster::names();
            let near = lockstep_plan::config::nearest(kind, names.iter().map(String::as_str));
            let meant = near.map_or(String::new(), |near| match ranks {
                Some(ranks) => format!("did you mean `{near}-{ranks}`? "),
                None => format!("did you mean `{near}`? "),
            });
            format!("no cluster is called `{name}`: {meant}there are {}, each with -RANKS behind it, or a file", names.join(", "))
        })
    }

    /// A described one, or what is wrong with the description.
    pub fn parse(text: &str) -> Result<Cluster, String> {
        let cluster: Cluster = toml::from_str(text).map_err(|error| error.to_string())?;
        cluster.check()?;
        Ok(cluster)
    }

    /// What is wrong with it, with the way out.
    pub fn check(&self) -> Result<(), String> {
        if self.per_host == 0 {
            return Err("per_host=0: a host has at least one rank".into());
        }
        let Some((last, others)) = self.links.split_last() else {
            return Err(
                "no [[links]]: describe at least one, without `span` it reaches every rank".into(),
            );
        };
        if let Some(span) = last.span {
            return Err(format!(
                "the last link, {}, ends at span={span}; leave its span out, so that it reaches every rank",
                last.name
            ));
        }
        if let Some(link) = others.iter().find(|link| link.span.is_none()) {
            return Err(format!(
                "the link {} has no span, but others follow; say how many ranks it joins",
                link.name
            ));
        }
        if let Some(link) =
            self.links.iter().find(|link| link.bandwidth_gbs.is_nan() || link.bandwidth_gbs <= 0.0)
        {
            return Err(format!(
                "the link {} has bandwidth_gbs={}; it must be positive",
                link.name, link.bandwidth_gbs
            ));
        }
        self.accelerator.check()
    }

    /// The environment of a plan for `ranks` ranks of this cluster.
    pub fn environment(&self, ranks: usize, data_vocab: Option<usize>) -> Environment {
        Environment {
            ranks,
            local_ranks: self.per_host.min(ranks),
            cores: self.cores.unwrap_or(1),
            offloaded_comm: self.engine == Engine::Nccl,
            data_vocab,
        }
    }

    /// Bytes per second that one rank sends over a link while its neighbours do the same.
    pub fn bandwidth(&self, link: usize) -> f64 {
        self.links[link].bandwidth(self.per_host)
    }

    /// As it is for ranks with so many threads each, of which there are so many: an accelerator of their own.
    pub(crate) fn shared(&self, ranks: usize, threads: usize) -> Cow<'_, Cluster> {
        if self.cores.is_none() {
            return Cow::Borrowed(self);
        }
        let together = ranks.min(self.per_host) as f64;
        let computing = self.share(ranks, threads);
        let Accelerator { peak, memory_gib, bandwidth_gbs, .. } = self.accelerator;
        let peak = Peak { f32: peak.f32 * computing, bf16: peak.bf16 * computing, fp8: None };
        let accelerator = Accelerator {
            peak,
            memory_gib: memory_gib / together,
            bandwidth_gbs: bandwidth_gbs / together,
            ..self.accelerator.clone()
        };
        Cow::Owned(Cluster { accelerator, ..self.clone() })
    }

    /// What a rank has of its host's cores when so many ranks with so many threads each want them: more threads than
    /// cores take turns.
    pub(crate) fn share(&self, ranks: usize, threads: usize) -> f64 {
        let together = ranks.min(self.per_host) as f64;
        self.cores.map_or(1.0, |cores| (threads as f64 / cores as f64).min(1.0 / together))
    }

    /// Whether any rank differs.
    pub fn even(&self) -> bool {
        self.differs.is_empty()
    }

    /// Of a rank: speed of its computing and of its links, and its memory in bytes.
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

    /// All ranks below `ranks` that differ.
    pub fn differing(&self, ranks: usize) -> Vec<usize> {
        let of_hosts = self.differs.iter().flat_map(|differs| &differs.hosts);
        let on_hosts = of_hosts.flat_map(|host| host * self.per_host..(host + 1) * self.per_host);
        let single = self.differs.iter().flat_map(|differs| differs.ranks.iter().copied());
        let mut all: Vec<usize> = on_hosts.chain(single).filter(|rank| *rank < ranks).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

pub(crate) const GIB: f64 = (1u64 << 30) as f64;

/// The built-in clusters, as they stand in the file.
fn tables() -> Vec<(String, toml::Value)> {
    let file: toml::Table = BUILT_IN.parse().expect("built_in.toml is TOML");
    match &file["clusters"] {
        toml::Value::Table(clusters) => clusters.clone().into_iter().collect(),
        _ => Vec::new(),
    }
}
