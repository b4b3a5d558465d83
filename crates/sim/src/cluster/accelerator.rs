//! What one accelerator does: how fast it multiplies, moves memory and starts kernels.

use serde::{Deserialize, Deserializer, Serialize};

use super::{BUILT_IN, Efficiency, GIB};

/// A device that computes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    pub name: String,
    pub peak: Peak,
    pub memory_gib: f64,
    /// Of its memory, by the data sheet.
    pub bandwidth_gbs: f64,
    /// Of that, what a kernel that only moves data reaches.
    pub stream: f64,
    /// Kernels that move so few bytes take no less than this.
    pub kernel_us: f64,
    /// Until the host has started a kernel: more of it than computing, and the device waits.
    pub launch_us: f64,
    pub matmul: Matmul,
    /// Fused attention, forward and backward: of the peak, what it reaches of the operations that a causal mask
    /// leaves, and the rows (sequences × heads × positions) with which it reaches half of that.
    pub attention: [(f64, f64); 2],
    /// Taken before any tensor: driver, libraries, communicators.
    pub reserve_gib: f64,
    /// Between two kernels, where the host that starts them is the device itself: nothing hides it.
    #[serde(default)]
    pub kernel_gap_us: f64,
    /// Measured instead of following from peak and bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub efficiency: Option<Efficiency>,
}

/// Operations per second, by the data sheet, in units of 10^12.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    pub f32: f64,
    pub bf16: f64,
    /// Where there is none, that of bf16.
    pub fp8: Option<f64>,
}

/// How much of the peak a matrix multiply reaches. The output is cut into tiles, of which every unit does one
/// at a time: what does not fill the tiles, or the last round of the units, is lost.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matmul {
    /// Tiles that are computed at the same time.
    pub units: usize,
    /// Rows, columns, and of the best efficiency what such tiles reach.
    pub tiles: Vec<(usize, usize, f64)>,
    /// Of the peak, with full tiles and a long inner dimension.
    pub best: f64,
    /// Of `best`, for gradients of weights, which are added to what is there in f32.
    pub accumulate: f64,
    /// Of `best`, in 8 bits, with the casts that go with it.
    #[serde(default = "one")]
    pub fp8: f64,
    /// Beginning and ending a tile takes as long as so much of the inner dimension.
    pub ramp: f64,
    /// Of the speed, where a dimension is no multiple of 64 numbers but of 8, where it is not even that, and where
    /// that is so of many small multiplies at once.
    pub misaligned: [f64; 3],
    /// Measured instead: (m·n·k)^(1/3), and of `best` what is reached there. Between points by the logarithm.
    #[serde(default)]
    pub curve: Vec<(f64, f64)>,
    /// Measured instead: a multiply as the sum of what it does, not as the longest of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overheads: Option<MatmulOverheads>,
}

/// Measured multiplies, by the numbers that go into them.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulOverheads {
    pub f32: MatmulOverhead,
    pub bf16: MatmulOverhead,
}

/// What a multiply takes beside its operations: on cores, nothing is computed while operands are packed.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulOverhead {
    /// Of the operations per second, for gradients of weights.
    pub accumulate: f64,
    /// Beginning one, and waiting for the last thread of it.
    pub start_us: f64,
    /// Of the memory's bandwidth, how fast operands and results pass; none: so fast that it was not seen.
    pub passes: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Accelerator {
    /// One that everybody knows.
    pub fn built_in(name: &str) -> Option<Accelerator> {
        let file: toml::Table = BUILT_IN.parse().expect("built_in.toml is TOML");
        let table = file["accelerators"].get(name)?.clone();
        Some(table.try_into().expect("built_in.toml describes accelerators"))
    }

    /// Bytes.
    pub fn memory(&self) -> f64 {
        self.memory_gib * GIB
    }

    /// Bytes per second that a kernel which only moves data reaches.
    pub fn stream_rate(&self) -> f64 {
        self.bandwidth_gbs * 1e9 * self.stream
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let positive = [
            ("peak.bf16", self.peak.bf16),
            ("peak.f32", self.peak.f32),
            ("memory_gib", self.memory_gib),
            ("bandwidth_gbs", self.bandwidth_gbs),
            ("stream", self.stream),
            ("matmul.best", self.matmul.best),
            ("matmul.units", self.matmul.units as f64),
        ];
        for (key, value) in positive {
            if value.is_nan() || value <= 0.0 {
                return Err(format!("accelerator {}: {key}={value} must be positive", self.name));
            }
        }
        if self.matmul.tiles.is_empty() {
            return Err(format!(
                "accelerator {}: matmul.tiles is empty; [[1, 1, 1.0]] cuts nothing",
                self.name
            ));
        }
        Ok(())
    }
}

/// A table, or the name of a built-in one.
pub(super) fn by_name<'de, D: Deserializer<'de>>(reader: D) -> Result<Accelerator, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Name(String),
        Table(Box<Accelerator>),
    }
    match Written::deserialize(reader)? {
        Written::Table(accelerator) => Ok(*accelerator),
        Written::Name(name) => Accelerator::built_in(&name).ok_or_else(|| {
            let why = format!("no accelerator is called `{name}`; describe it in a table, or take one of built_in.toml");
            serde::de::Error::custom(why)
        }),
    }
}
