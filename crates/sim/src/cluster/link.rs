//! Links between ranks: one level of the topology.

use serde::{Deserialize, Serialize};

/// A kind of link and its reach.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// NVSwitch, PCIe, InfiniBand, ….
    pub name: String,
    /// Number of consecutive ranks that the link connects, e.g. those of a host or a leaf switch. Absent: all.
    pub span: Option<usize>,
    /// Start-up time of a collective.
    pub start_us: f64,
    /// Latency from one rank to the next.
    pub hop_us: f64,
    /// Bandwidth that a collective reaches, per rank, or per rail if `rails` is set.
    pub bandwidth_gbs: f64,
    /// Network cards of a host, shared by its ranks.
    pub rails: Option<usize>,
    /// Oversubscription of the switches: down-links per up-link.
    #[serde(default = "one")]
    pub oversubscription: f64,
}

fn one() -> f64 {
    1.0
}

impl Link {
    /// Bytes per second of a rank while all ranks of its host send.
    pub(super) fn bandwidth(&self, per_host: usize) -> f64 {
        let share = self.rails.map_or(1.0, |rails| rails as f64 / per_host as f64);
        self.bandwidth_gbs * 1e9 * share / self.oversubscription
    }

    pub fn start(&self) -> f64 {
        self.start_us * 1e-6
    }

    pub fn hop(&self) -> f64 {
        self.hop_us * 1e-6
    }
}
