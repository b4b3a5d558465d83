//! Measured rates of fused attention, by head size and sequence length.

use lockstep_plan::Dtype;
use serde::{Deserialize, Serialize};

/// Measured rates by compute type.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttentionRates {
    pub f32: Vec<AttentionRate>,
    pub bf16: Vec<AttentionRate>,
}

/// One measurement.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRate {
    pub head_dim: usize,
    pub seq: usize,
    /// Fraction of the peak reached on the causal FLOPs, forward and deterministic backward.
    pub reached: [f64; 2],
    /// The same for a backward pass that need not be deterministic. None: as deterministic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nondeterministic: Option<f64>,
}

impl AttentionRate {
    fn passes(&self, deterministic: bool) -> [f64; 2] {
        let [forward, backward] = self.reached;
        let other = self.nondeterministic.filter(|_| !deterministic);
        [forward, other.unwrap_or(backward)]
    }
}

impl AttentionRates {
    pub fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    /// Multiplies all rates.
    pub(crate) fn scale(&mut self, factor: f64) {
        for rate in self.f32.iter_mut().chain(&mut self.bf16) {
            rate.reached = rate.reached.map(|reached| reached * factor);
            rate.nondeterministic = rate.nondeterministic.map(|reached| reached * factor);
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &AttentionRate> {
        self.f32.iter().chain(&self.bf16)
    }

    /// Rates at a head size and a length: those of the nearest measured head size, interpolated log-log between
    /// lengths and constant beyond them. None if the type was not measured.
    pub fn at(
        &self,
        compute: Dtype,
        deterministic: bool,
        [head_dim, seq]: [f64; 2],
    ) -> Option<[f64; 2]> {
        let measured = if compute == Dtype::F32 { &self.f32 } else { &self.bf16 };
        let far = |rate: &&AttentionRate| (rate.head_dim as f64 / head_dim).ln().abs();
        let nearest = measured.iter().min_by(|a, b| far(a).total_cmp(&far(b)))?.head_dim;
        let of_size: Vec<_> = measured.iter().filter(|rate| rate.head_dim == nearest).collect();
        let last = |below: bool| {
            let on_side = |rate: &&&AttentionRate| (rate.seq as f64 <= seq) == below;
            let near = |rate: &&&AttentionRate| (rate.seq as f64 / seq).ln().abs();
            of_size.iter().filter(on_side).min_by(|a, b| near(a).total_cmp(&near(b)))
        };
        let (low, high) = match (last(true), last(false)) {
            (Some(low), Some(high)) => (low, high),
            (Some(only), None) | (None, Some(only)) => return Some(only.passes(deterministic)),
            (None, None) => return None,
        };
        let (from, to) = (low.passes(deterministic), high.passes(deterministic));
        let share = (seq / low.seq as f64).ln() / (high.seq as f64 / low.seq as f64).ln();
        let between = |at: usize| from[at] * (to[at] / from[at]).powf(share);
        Some([between(0), between(1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_interpolated_in_the_nearest_head_size() {
        let rate = |head_dim, seq, reached| AttentionRate {
            head_dim,
            seq,
            reached,
            nondeterministic: (seq == 4096).then_some(0.3),
        };
        let mut rates = AttentionRates {
            bf16: vec![
                rate(64, 4096, [0.4, 0.2]),
                rate(64, 1024, [0.1, 0.2]),
                rate(128, 1024, [0.5, 0.3]),
            ],
            ..AttentionRates::default()
        };
        let at = |head_dim, seq| rates.at(Dtype::Bf16, true, [head_dim, seq]).unwrap();
        assert_eq!(at(64.0, 512.0), [0.1, 0.2]);
        assert_eq!(at(64.0, 1e5), [0.4, 0.2]);
        assert_eq!(at(112.0, 4096.0), [0.5, 0.3]);
        let [forward, backward] = at(70.0, 2048.0);
        assert!((forward - 0.2).abs() < 1e-9 && (backward - 0.2).abs() < 1e-9);
        assert_eq!(rates.at(Dtype::F32, true, [64.0, 1024.0]), None);
        let any_order = |seq| rates.at(Dtype::Bf16, false, [64.0, seq]).unwrap();
        assert_eq!(any_order(4096.0), [0.4, 0.3]);
        assert_eq!(any_order(1024.0), [0.1, 0.2]);
        rates.scale(0.5);
        assert_eq!(rates.at(Dtype::Bf16, true, [64.0, 4096.0]), Some([0.2, 0.1]));
        assert_eq!(rates.at(Dtype::Bf16, false, [64.0, 4096.0]), Some([0.2, 0.15]));
    }
}
