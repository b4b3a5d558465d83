//! `manifest.json`: the files of a checkpoint with a checksum per chunk, and the location of every slice of every
//! tensor. Its first line is its own checksum.

use crate::error::{Error, Result};
use crate::extra_state::ExtraState;
use crate::regular;
use crate::tensors::Named;
use lockstep_plan::model::{Runs, Shape};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;

pub(crate) const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "lockstep-checkpoint";
const VERSION: u64 = 2;

/// Largest manifest.
const MAX_BYTES: u64 = 1 << 30;

/// Bytes per checksum.
pub const CHUNK: usize = 4 << 20;

/// Role of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    Param,
    /// AdamW's first moment.
    First,
    /// AdamW's second moment.
    Second,
    /// Error feedback of compressed gradients: the part not sent yet. Per rank.
    #[serde(alias = "owed")]
    Residual,
    /// Running magnitude of the values that a rank sends with top-k compression. Per rank.
    #[serde(alias = "usual")]
    Magnitude,
}

impl TensorKind {
    pub const ALL: [TensorKind; 5] = [
        TensorKind::Param,
        TensorKind::First,
        TensorKind::Second,
        TensorKind::Residual,
        TensorKind::Magnitude,
    ];

    /// Whether each rank has its own tensor rather than a slice of a global one.
    pub fn is_per_rank(self) -> bool {
        matches!(self, TensorKind::Residual | TensorKind::Magnitude)
    }

    pub fn name(self) -> &'static str {
        match self {
            TensorKind::Param => "param",
            TensorKind::First => "first",
            TensorKind::Second => "second",
            TensorKind::Residual => "residual",
            TensorKind::Magnitude => "magnitude",
        }
    }
}

impl fmt::Display for TensorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// State of the training other than tensors.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Head {
    /// Completed optimizer steps.
    pub step: u64,
    /// Generation that wrote the checkpoint.
    pub generation: u64,
    /// Data position and seed.
    pub position: Position,
    pub shape: Shape,
    /// Plan of the run; null for imported weights.
    pub plan: Value,
    #[serde(default, alias = "carried")]
    pub extra: ExtraState,
}

/// Position of a training. Samples, dropout and initial values are functions of the seed and counters, so nothing else
/// is needed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Position {
    /// Samples used so far.
    pub samples: u64,
    pub seed: u64,
    /// Identity of the data source.
    pub data: String,
    /// The run has used the first global batch. Earlier versions skipped it.
    #[serde(default)]
    pub first_batch_used: bool,
}

/// Contents of `manifest.json`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u64,
    /// Program that wrote it.
    pub program: String,
    #[serde(flatten)]
    pub head: Head,
    pub chunk_bytes: usize,
    /// One per writer.
    pub files: Vec<FileSum>,
    pub tensors: Vec<TensorAt>,
}

/// A file and its checksums.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileSum {
    pub name: String,
    pub bytes: u64,
    /// blake3 of each chunk.
    pub chunks: Vec<String>,
}

/// A tensor and the locations of its pieces.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TensorAt {
    pub kind: TensorKind,
    #[serde(flatten)]
    pub named: Named,
    pub pieces: Vec<PieceAt>,
}

/// A piece of a tensor: f32, little-endian.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PieceAt {
    /// Index in `files`.
    pub file: usize,
    /// Offset of the first byte.
    pub at: u64,
    /// Elements of the flattened tensor, in order.
    pub runs: Vec<Runs>,
    /// For per-rank tensors: whether the piece is a term of the sum over ranks, not a copy of another rank's piece.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub counts: bool,
}

fn yes() -> bool {
    true
}

fn is_yes(counts: &bool) -> bool {
    *counts
}

/// The file of one writer and the offsets of its pieces.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Written {
    pub file: FileSum,
    pub pieces: Vec<(Piece, u64)>,
}

/// A piece of a tensor.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Piece {
    pub kind: TensorKind,
    /// Name and dims of the whole tensor.
    pub named: Named,
    /// Elements of the flattened tensor, in order.
    pub runs: Vec<Runs>,
    /// See [`PieceAt::counts`].
    pub counts: bool,
}

impl Piece {
    /// Elements.
    pub fn len(&self) -> usize {
        self.runs.iter().map(Runs::elements).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Manifest {
    /// The manifest of the files of all writers.
    pub fn of(head: Head, chunk_bytes: usize, parts: Vec<Written>) -> Manifest {
        let (mut files, mut tensors) = (Vec::new(), Vec::<TensorAt>::new());
        let mut index: HashMap<(TensorKind, String), usize> = HashMap::new();
        for (file, part) in parts.into_iter().enumerate() {
            files.push(part.file);
            for (Piece { kind, named, runs, counts }, at) in part.pieces {
                let at = PieceAt { file, at, runs, counts };
                let number = *index.entry((kind, named.name.clone())).or_insert_with(|| {
                    tensors.push(TensorAt { kind, named, pieces: Vec::new() });
                    tensors.len() - 1
                });
                tensors[number].pieces.push(at);
            }
        }
        let program = concat!("lockstep ", env!("CARGO_PKG_VERSION")).into();
        let format = FORMAT.into();
        Manifest { format, version: VERSION, program, head, chunk_bytes, files, tensors }
    }

    /// Total size of the files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |all, file| all.saturating_add(file.bytes))
    }

    /// The file contents: a JSON object whose first line is the checksum of the rest.
    pub(crate) fn text(&self) -> String {
        let body = serde_json::to_string(self).expect("maps with string keys become JSON");
        let body = &body[1..];
        format!(
            "{OPENING}{}{CLOSING}{body}\n",
            blake3::hash(format!("{body}\n").as_bytes()).to_hex()
        )
    }

    pub(crate) fn read(dir: &Path) -> Result<Manifest> {
        let path = dir.join(MANIFEST);
        let bytes = regular::read(&path, MAX_BYTES)?;
        Manifest::parse(&bytes).map_err(|what| Error::corrupt(&path, 0, what))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Manifest, String> {
        let rest = bytes.strip_prefix(OPENING.as_bytes());
        let (sum, rest) = rest
            .and_then(|rest| rest.split_at_checked(2 * blake3::OUT_LEN))
            .ok_or_else(|| format!("not a Lockstep checkpoint manifest (no {FORMAT} header)"))?;
        let body = rest.strip_prefix(CLOSING.as_bytes());
        let body =
            body.ok_or_else(|| format!("not a Lockstep checkpoint manifest (no {FORMAT} header)"))?;
        if blake3::hash(body).to_hex().as_bytes() != sum {
            return Err("checksum mismatch".into());
        }
        let whole = [b"{", body].concat();
        let invalid = |error: serde_json::Error| format!("invalid manifest: {error}");
        // Check the version first: the fields of other versions may differ.
        let Version { format, version } = serde_json::from_slice(&whole).map_err(invalid)?;
        match (format.as_str(), version) {
            (Some(FORMAT), Some(VERSION)) => serde_json::from_slice(&whole).map_err(invalid),
            (Some(FORMAT), Some(version)) => Err(format!(
                "checkpoint version {version} is not supported (this program reads version {VERSION}); use the program that wrote it"
            )),
            _ => Err(format!("not a Lockstep checkpoint manifest (format is {format})")),
        }
    }
}

/// The fields that all versions have.
#[derive(Deserialize)]
struct Version {
    #[serde(default)]
    format: Value,
    version: Option<u64>,
}

const OPENING: &str = "{\"blake3\":\"";
const CLOSING: &str = "\",\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let shape = lockstep_plan::presets::shape("gpt2-test", Some(64)).expect("a preset");
        let plan = serde_json::json!({"lr": 3e-4});
        let data = "grammar".into();
        let position = Position { samples: 12, seed: 3, data, first_batch_used: true };
        let learner = serde_json::json!({"policy_version": 7});
        let extra = ExtraState { skipped_samples: 3, expert_slots: vec![5, 0, 2], learner };
        let head = Head { step: 4, generation: 2, position, shape, plan, extra };
        let named = Named { name: "embed.tokens".into(), dims: vec![4, 4] };
        let runs = vec![Runs { start: 0, len: 2, stride: 4, count: 4 }];
        let piece = Piece { kind: TensorKind::Param, named, runs, counts: true };
        let file =
            FileSum { name: "rank-00000.safetensors".into(), bytes: 99, chunks: vec!["ab".into()] };
        Manifest::of(head, CHUNK, vec![Written { file, pieces: vec![(piece, 64)] }])
    }

    #[test]
    fn round_trips_as_json() {
        let text = manifest().text();
        assert_eq!(Manifest::parse(text.as_bytes()), Ok(manifest()));
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["tensors"][0]["pieces"][0]["runs"][0], serde_json::json!([0, 2, 4, 4]));
        assert_eq!(value["step"], 4);
    }

    #[test]
    fn every_flipped_bit_and_truncation_is_detected() {
        let whole = manifest().text().into_bytes();
        for bit in 0..8 * whole.len() {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::parse(&bytes).is_err(), "bit {bit}");
        }
        for length in 0..whole.len() {
            assert!(Manifest::parse(&whole[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn other_versions_are_rejected() {
        for (change, says) in [
            (
                Manifest { version: 3, ..manifest() },
                "version 3 is not supported (this program reads version 2)",
            ),
            (
                Manifest { format: "other".into(), ..manifest() },
                "not a Lockstep checkpoint manifest",
            ),
        ] {
            let error = Manifest::parse(change.text().as_bytes()).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
