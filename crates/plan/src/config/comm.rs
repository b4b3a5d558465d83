//! `[comm]`: communication between ranks and compression of gradients.

use super::Reader;
use super::nearest::nearest;
use lockstep_types::DeviceEngine;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `[comm]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Comm {
    /// Seconds without a sign of life after which a peer counts as lost.
    pub timeout_s: Option<f64>,
    /// Bucket size of the gradient reduction, in MiB.
    pub bucket_mb: Option<f64>,
    /// Gradient compression along the data axis.
    pub compression: Option<Compression>,
    /// Initial steps with uncompressed gradients.
    pub compression_warmup: Option<usize>,
    /// Overlap communication with compute.
    pub overlap: Option<bool>,
    /// Engine of collectives on device memory.
    pub device_engine: Option<DeviceEngine>,
    /// Register the buffers of collectives with NCCL.
    pub register_buffers: Option<bool>,
}

/// Gradient compression along the data axis, with error feedback: the residual of rounding or selection is added to
/// the next step's gradient. Serialized as typed: `int8`, `topk:0.01`.
///
/// ```
/// use lockstep_plan::Compression;
/// assert_eq!("topk:0.01".parse(), Ok(Compression::TopK(0.01)));
/// assert_eq!(Compression::Bf16.to_string(), "bf16");
/// ```
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// Uncompressed f32.
    #[default]
    None,
    Bf16,
    /// Scaled by a power of two per chunk, against underflow and overflow.
    F16,
    /// Integers up to ±127 with a scale per chunk.
    Int8,
    /// Only the given fraction of elements of each reduction: those that are largest relative to their usual size. ZeRO
    /// 0 and 1 reduce once per step. ZeRO 2 and 3 reduce after every micro-batch, so with a micro-batches per step they
    /// send a times the fraction.
    TopK(f64),
}

/// Text that is not a valid compression.
#[derive(Clone, PartialEq, Eq)]
pub struct ParseCompressionError {
    pub message: String,
    pub suggestion: String,
}

const WORDS: [(&str, Compression); 4] = [
    ("none", Compression::None),
    ("bf16", Compression::Bf16),
    ("f16", Compression::F16),
    ("int8", Compression::Int8),
];

const KNOWN: &str = "\"none\", \"bf16\", \"f16\", \"int8\", \"topk:0.01\"";

impl Comm {
    pub(super) fn read(reader: &mut Reader) -> Comm {
        Comm {
            timeout_s: reader.number("comm.timeout_s"),
            bucket_mb: reader.number("comm.bucket_mb"),
            compression: reader.parsed(
                "comm.compression",
                &format!("be one of {KNOWN}"),
                |typed| {
                    typed.parse().map_err(|no: ParseCompressionError| (no.message, no.suggestion))
                },
            ),
            compression_warmup: reader.count("comm.compression_warmup"),
            overlap: reader.flag("comm.overlap"),
            device_engine: reader.parsed(
                "comm.device_engine",
                "be one of \"auto\", \"shared\", \"nccl\", \"mpi\", \"host\"",
                |typed| {
                    let words = DeviceEngine::ALL.map(DeviceEngine::name);
                    typed.parse().map_err(|message| match nearest(typed, words.into_iter()) {
                        Some(meant) => (message, format!("did you mean \"{meant}\"?")),
                        None => (message, "use \"auto\"".to_string()),
                    })
                },
            ),
            register_buffers: reader.flag("comm.register_buffers"),
        }
    }
}

impl Compression {
    /// Whether the compressed value of an element depends on other elements: through the scale of its chunk, or
    /// because larger ones are selected.
    pub fn depends_on_neighbours(self) -> bool {
        match self {
            Compression::None | Compression::Bf16 => false,
            Compression::F16 | Compression::Int8 | Compression::TopK(_) => true,
        }
    }

    /// Elements of `len` that a rank sends: with top-k a fraction, but at least one.
    pub fn selected(self, len: usize) -> usize {
        match self {
            Compression::TopK(fraction) => {
                ((fraction * len as f64).ceil() as usize).clamp(len.min(1), len)
            }
            _ => len,
        }
    }

    /// f32 numbers per element that a compressor carries from step to step: the residual and, for top-k, mean squares.
    pub fn state_rows(self) -> usize {
        match self {
            Compression::None => 0,
            Compression::Bf16 | Compression::F16 | Compression::Int8 => 1,
            Compression::TopK(_) => 2,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Compression::TopK(fraction) => write!(f, "topk:{fraction}"),
            other => {
                let word = WORDS.iter().find(|(_, how)| how == other);
                f.write_str(word.expect("all but topk are words").0)
            }
        }
    }
}

impl FromStr for Compression {
    type Err = ParseCompressionError;

    /// Checks the syntax only. `Plan::resolve` checks the range of the fraction.
    fn from_str(typed: &str) -> Result<Compression, ParseCompressionError> {
        if let Some((_, how)) = WORDS.iter().find(|(word, _)| *word == typed) {
            return Ok(*how);
        }
        let (word, fraction) = match typed.split_once(':') {
            Some((word, fraction)) => (word, Some(fraction)),
            None => (typed, None),
        };
        match (word, fraction.map(str::parse)) {
            ("topk", Some(Ok(fraction))) => Ok(Compression::TopK(fraction)),
            ("topk", Some(Err(_))) => Err(ParseCompressionError {
                message: format!("\"{}\" is not a number", fraction.unwrap_or_default()),
                suggestion: "write for example topk:0.01".into(),
            }),
            ("topk", None) => Err(ParseCompressionError {
                message: "topk needs the fraction to send".into(),
                suggestion: "write for example topk:0.01".into(),
            }),
            _ => Err(unknown(typed, word)),
        }
    }
}

fn unknown(typed: &str, word: &str) -> ParseCompressionError {
    let words = WORDS.iter().map(|(word, _)| *word).chain(["topk"]);
    let suggestion = match nearest(word, words) {
        Some("topk") => "did you mean \"topk:0.01\"?".into(),
        Some(meant) => format!("did you mean \"{meant}\"?"),
        None => format!("use one of {KNOWN}"),
    };
    ParseCompressionError { message: format!("unknown compression \"{typed}\""), suggestion }
}

/// The text of `Display`, which `?` in `main` and `unwrap` then print.
impl fmt::Debug for ParseCompressionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ParseCompressionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.suggestion)
    }
}

impl std::error::Error for ParseCompressionError {}

impl TryFrom<String> for Compression {
    type Error = ParseCompressionError;

    fn try_from(typed: String) -> Result<Compression, ParseCompressionError> {
        typed.parse()
    }
}

impl From<Compression> for String {
    fn from(how: Compression) -> String {
        how.to_string()
    }
}
