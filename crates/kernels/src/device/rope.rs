//! Rotary position embedding of queries and keys.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{AttentionShape, Backend, Device, OpClass, with_float};
use crate::ViewMut;
use crate::cpu::rope::{self, Positions, Rope};
use crate::cuda;

/// Cosines and sines of all positions, computed once in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// The same for equal tables, so that a device holds one copy of them.
    id: u64,
    head_dim: usize,
    positions: usize,
    cos: Vec<f32>, // (positions, head_dim / 2)
    sin: Vec<f32>, // (positions, head_dim / 2)
}

/// Frequency scaling of Llama 3.1 and later, which extends the context beyond the one used in pretraining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Frequencies with fewer turns than this in the original context are divided by the full factor.
    pub low_freq_factor: f64,
    /// Frequencies with more turns than this in the original context are unchanged.
    pub high_freq_factor: f64,
    /// Original context length, in tokens.
    pub original_positions: usize,
}

impl RopeTable {
    /// # Panics
    /// If `head_dim` is odd.
    pub fn new(
        head_dim: usize,
        positions: usize,
        theta: f64,
        scaling: Option<RopeScaling>,
    ) -> RopeTable {
        assert!(
            head_dim.is_multiple_of(2),
            "head_dim={head_dim} must be even for rotary embedding"
        );
        let frequencies: Vec<f64> = (0..head_dim / 2)
            .map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64))
            .map(|frequency| scaling.map_or(frequency, |scaling| scaling.apply(frequency)))
            .collect();
        let angles = (0..positions)
            .flat_map(|at| frequencies.iter().map(move |frequency| at as f64 * frequency));
        let (cos, sin) = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        let scaling = scaling.map(|s| {
            let factors = [s.factor, s.low_freq_factor, s.high_freq_factor].map(f64::to_bits);
            (factors, s.original_positions)
        });
        let id = hash(&(head_dim, positions, theta.to_bits(), scaling));
        RopeTable { id, head_dim, positions, cos, sin }
    }

    /// Identifies the table's contents.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// All cosines, then all sines.
    pub(crate) fn cosines_and_sines(&self) -> Vec<f32> {
        [&self.cos[..], &self.sin].concat()
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Number of positions in the table.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Cosines and sines of one position, (head_dim / 2) each.
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.head_dim / 2;
        let range = position * half..(position + 1) * half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f64) -> f64 {
        let turns = self.original_positions as f64 * frequency / std::f64::consts::TAU;
        let weight =
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        let weight = weight.clamp(0.0, 1.0);
        frequency * weight + frequency / self.factor * (1.0 - weight)
    }
}

impl Device {
    /// Rotates the queries and keys in the rows of `qkv` by their positions, in place.
    pub fn rope(&self, table: &RopeTable, shape: &AttentionShape, qkv: ViewMut<'_>) {
        let rope = queries_and_keys(table, shape, &qkv);
        self.execute(OpClass::Rope, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(qkv.dtype(), E => rope::forward::<E>(cpu, qkv.host(), &rope))
            }
            Backend::Cuda(gpu) => cuda::rope::forward(gpu, qkv, &rope),
        })
    }

    /// Rotates the gradients back, in place.
    pub fn rope_backward(&self, table: &RopeTable, shape: &AttentionShape, dqkv: ViewMut<'_>) {
        let rope = queries_and_keys(table, shape, &dqkv);
        self.execute(OpClass::Rope, |backend| match backend {
            Backend::Cpu(cpu) => {
                with_float!(dqkv.dtype(), E => rope::backward::<E>(cpu, dqkv.host(), &rope))
            }
            Backend::Cuda(gpu) => cuda::rope::backward(gpu, dqkv, &rope),
        })
    }
}

fn hash(settings: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    settings.hash(&mut hasher);
    hasher.finish()
}

/// The heads of queries and keys in rows that also hold values.
fn queries_and_keys<'a>(
    table: &'a RopeTable,
    shape: &AttentionShape,
    qkv: &ViewMut<'_>,
) -> Rope<'a> {
    let positions = Positions::From { start: shape.q_start, len: shape.q_len };
    let (rows, heads) = (qkv.rows(), shape.heads + shape.kv_heads);
    Rope { table, rows, heads, offset: 0, stride: qkv.cols(), positions }
}
