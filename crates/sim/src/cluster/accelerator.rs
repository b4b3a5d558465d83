//! Speed and memory of one accelerator.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::{AttentionRates, BUILT_IN, Curve, Efficiency, GIB};

/// A compute device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    pub name: String,
    pub peak: Peak,
    pub memory_gib: f64,
    /// Memory bandwidth of the data sheet.
    pub bandwidth_gbs: f64,
    /// Fraction of the bandwidth that a copy kernel reaches.
    pub stream: f64,
    /// Minimum duration of a kernel.
    pub kernel_us: f64,
    /// Time for the host to launch a kernel. The device waits if this exceeds its compute time.
    pub launch_us: f64,
    /// Mean time of kernels that are too small to fill the device, by tokens of a micro-batch.
    #[serde(default, skip_serializing_if = "Curve::is_empty")]
    pub short_kernel_us: Curve,
    /// Time of the host once per step, with the device idle: reading loss and norm, and starting the next step. Updates of
    /// the optimizer overlap with it.
    #[serde(default)]
    pub step_us: f64,
    pub matmul: Matmul,
    /// Fused attention, forward and backward: fraction of the peak reached on the causal FLOPs, and the rows
    /// (sequences × heads × positions) at which half of that fraction is reached.
    pub attention: [(f64, f64); 2],
    /// Measured rates of fused attention, used instead of `attention`.
    #[serde(default, skip_serializing_if = "AttentionRates::is_empty")]
    pub attention_rates: AttentionRates,
    /// GB/s between page-locked host memory and the device: to it, and from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_gbs: Option<[f64; 2]>,
    /// Memory used before any tensor: driver, libraries, communicators.
    pub reserve_gib: f64,
    /// Gap between two kernels if the host is the device itself, so that launches cannot be hidden.
    #[serde(default)]
    pub kernel_gap_us: f64,
    /// Bandwidth of copies between device and page-locked host memory, in each direction.
    #[serde(default = "host_link_gbs")]
    pub host_link_gbs: f64,
    /// Bandwidth of the host's memory for one device, at which an offloaded optimizer runs.
    #[serde(default = "host_bandwidth_gbs")]
    pub host_bandwidth_gbs: f64,
    /// Measured efficiency, used instead of peak and bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub efficiency: Option<Efficiency>,
}

/// PCIe 4 with 16 lanes.
fn host_link_gbs() -> f64 {
    24.0
}

/// Half of a socket with eight channels of DDR5.
fn host_bandwidth_gbs() -> f64 {
    100.0
}

/// Peak TFLOP/s of the data sheet.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    pub f32: f64,
    pub bf16: f64,
    /// Defaults to bf16.
    pub fp8: Option<f64>,
    /// f32 inputs rounded to TF32 (`device.tf32`). Defaults to f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tf32: Option<f64>,
}

/// Efficiency of matmuls. The output is split into tiles, and every unit computes one tile at a time. Partial tiles and
/// a partial last wave of the units are lost (tile and wave quantization).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matmul {
    /// Number of tiles that are computed at the same time.
    pub units: usize,
    /// Tile sizes: rows, columns, and their efficiency relative to `best`.
    pub tiles: Vec<(usize, usize, f64)>,
    /// Fraction of the peak with full tiles and a long inner dimension.
    pub best: f64,
    /// Fraction of `best` for weight gradients, which accumulate into f32.
    pub accumulate: f64,
    /// Fraction of `best` in FP8, including casts.
    #[serde(default = "one")]
    pub fp8: f64,
    /// Prologue and epilogue of a tile, as an equivalent length of the inner dimension.
    pub ramp: f64,
    /// Relative speed if a dimension is a multiple of 8 but not of 64, if it is not a multiple of 8, and the latter for
    /// batched matmuls.
    pub misaligned: [f64; 3],
    /// Measured points ((m·n·k)^(1/3), fraction of `best`), interpolated in the logarithm of the size.
    #[serde(default)]
    pub curve: Vec<(f64, f64)>,
    /// Measured overheads. If set, the time is the sum of compute, memory and start instead of their maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overheads: Option<MatmulOverheads>,
}

/// Measured matmul overheads by type.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulOverheads {
    pub f32: MatmulOverhead,
    pub bf16: MatmulOverhead,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tf32: Option<MatmulOverhead>,
}

/// Overheads of a matmul. CPU cores do not compute while they pack operands; on a GPU the first and the last tile of
/// each unit are not overlapped with compute.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulOverhead {
    /// Fraction of the peak that compute alone reaches.
    #[serde(default = "one")]
    pub best: f64,
    /// Relative FLOP/s of weight gradients.
    pub accumulate: f64,
    /// Start, and waiting for the last thread.
    pub start_us: f64,
    /// Speed at which operands and results are moved, relative to the memory bandwidth. None: too fast to measure.
    pub passes: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Accelerator {
    /// An accelerator of built_in.toml.
    pub fn built_in(name: &str) -> Option<Accelerator> {
        let table = built_in().remove(name)?;
        Some(table.try_into().expect("built_in.toml describes accelerators"))
    }

    /// Memory in bytes.
    pub fn memory(&self) -> f64 {
        self.memory_gib * GIB
    }

    /// Seconds of a kernel with little work, in a micro-batch of some tokens.
    pub(crate) fn short_kernel(&self, tokens: f64) -> f64 {
        1e-6 * self.short_kernel_us.at(tokens).unwrap_or(0.0)
    }

    /// Bytes per second of a copy kernel.
    pub fn stream_rate(&self) -> f64 {
        self.bandwidth_gbs * 1e9 * self.stream
    }
}

/// Deserializes a table, or the name of a built-in accelerator.
pub(super) fn by_name<'de, D: Deserializer<'de>>(reader: D) -> Result<Accelerator, D::Error> {
    match toml::Value::deserialize(reader)? {
        toml::Value::String(name) => Accelerator::built_in(&name).ok_or_else(|| {
            let names = built_in().keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            Error::custom(format!(
                "unknown accelerator `{name}`; describe it in an [accelerator] table, or use one of {names}"
            ))
        }),
        table @ toml::Value::Table(_) => {
            // The error ends with the key in which it is, on a line of its own.
            table.try_into().map_err(|error| Error::custom(error.to_string().trim_end()))
        }
        other => Err(Error::custom(format!(
            "accelerator must be a table or the name of a built-in one (got {other})"
        ))),
    }
}

/// The accelerators of built_in.toml.
fn built_in() -> toml::Table {
    let file: toml::Table = BUILT_IN.parse().expect("built_in.toml is TOML");
    file["accelerators"].as_table().expect("built_in.toml has accelerators").clone()
}
