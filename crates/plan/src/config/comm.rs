//! `[comm]`: what ranks may expect of each other, and in what form gradients travel.

use super::Reader;
use super::nearest::nearest;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// `[comm]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Comm {
    /// How long a rank waits for a peer before it calls it lost.
    pub timeout_s: Option<f64>,
    /// Gradients are reduced in buckets of about this many MiB.
    pub bucket_mb: Option<f64>,
    /// In what form gradients travel along the data axis.
    pub compression: Option<Compression>,
    /// Steps at the start in which gradients travel whole all the same.
    pub compression_warmup: Option<usize>,
    /// Whether exchanges go on beside the computing.
    pub overlap: Option<bool>,
}

/// In what form gradients travel along the data axis. What rounding or selection leaves behind joins the next
/// step's gradient. Written as it is typed: `int8`, `topk:0.01`.
///
/// ```
/// use lockstep_plan::Compression;
/// assert_eq!("topk:0.01".parse(), Ok(Compression::TopK(0.01)));
/// assert_eq!(Compression::Bf16.to_string(), "bf16");
/// ```
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// As they are, in f32.
    #[default]
    None,
    Bf16,
    /// With a power of two per chunk, so that small gradients do not vanish and large ones do not overflow.
    F16,
    /// Whole numbers up to 127 with a scale per chunk.
    Int8,
    /// This fraction of the elements, the largest ones.
    TopK(f64),
}

/// What was typed instead of a compression, and the way out.
#[derive(Clone, PartialEq, Eq, Debug)]
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
            compression: reader.parsed("comm.compression", &format!("one of {KNOWN}"), |typed| {
                typed.parse().map_err(|no: ParseCompressionError| (no.message, no.suggestion))
            }),
            compression_warmup: reader.count("comm.compression_warmup"),
            overlap: reader.flag("comm.overlap"),
        }
    }
}

impl Compression {
    /// Whether what becomes of a number depends on the numbers beside it: by the scale of their chunk, or because
    /// they are larger.
    pub fn goes_by_neighbours(self) -> bool {
        match self {
            Compression::None | Compression::Bf16 => false,
            Compression::F16 | Compression::Int8 | Compression::TopK(_) => true,
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

    /// Only of what can be read; whether a fraction makes sense is `Plan::resolve`'s to judge.
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
                message: format!("\"{}\" is no fraction", fraction.unwrap_or_default()),
                suggestion: "write it as in topk:0.01".into(),
            }),
            ("topk", None) => Err(ParseCompressionError {
                message: "topk does not say which fraction to send".into(),
                suggestion: "write it as in topk:0.01".into(),
            }),
            _ => Err(stranger(typed, word)),
        }
    }
}

fn stranger(typed: &str, word: &str) -> ParseCompressionError {
    let words = WORDS.iter().map(|(word, _)| *word).chain(["topk"]);
    let suggestion = match nearest(word, words) {
        Some("topk") => "did you mean \"topk:0.01\"?".into(),
        Some(meant) => format!("did you mean \"{meant}\"?"),
        None => format!("write one of {KNOWN}"),
    };
    ParseCompressionError { message: format!("\"{typed}\" is none of {KNOWN}"), suggestion }
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
