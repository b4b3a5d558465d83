//! What joins ranks: one level of a topology.

use serde::{Deserialize, Serialize};

/// A kind of link, and whom it reaches.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// NVSwitch, PCIe, InfiniBand, ….
    pub name: String,
    /// Neighbouring ranks that it joins, with those of closer links: a host's, a leaf switch's. Absent: all.
    pub span: Option<usize>,
    /// Before a collective moves its first byte.
    pub start_us: f64,
    /// From one rank to the next.
    pub hop_us: f64,
    /// That a collective reaches: of one rank, or where there are rails of one rail.
    pub bandwidth_gbs: f64,
    /// Network cards of a host, which its ranks share.
    pub rails: Option<usize>,
    /// Down-links per up-link of the switches between, when all talk at once.
    #[serde(default = "one")]
    pub oversubscription: f64,
}

fn one() -> f64 {
    1.0
}

impl Link {
    /// Bytes per second of one rank while all ranks of its host send.
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
