//! `manifest.json`: what a checkpoint says of itself. Which files, with a checksum for each chunk; which tensors,
//! and which runs of each lie where. Its first line is its own checksum, so that nothing in it is taken on trust.

use crate::carried::Carried;
use crate::error::{Error, Result};
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

/// Bytes of a file that are checked together.
pub const CHUNK: usize = 4 << 20;

/// What a tensor is to the training.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The parameter itself.
    Param,
    /// The optimizer's average of its gradient.
    First,
    /// The optimizer's average of the gradient's square.
    Second,
    /// What of its gradient a rank had not sent yet: error feedback, where gradients are compressed. Each
    /// rank's own.
    Owed,
    /// What is usual in each place of what a rank sends, where it sends the largest elements. Each rank's own.
    Usual,
}

impl Kind {
    pub const ALL: [Kind; 5] = [Kind::Param, Kind::First, Kind::Second, Kind::Owed, Kind::Usual];

    /// Whether each rank has one of its own, and not a slice of one that is everybody's.
    pub fn of_each_rank(self) -> bool {
        matches!(self, Kind::Owed | Kind::Usual)
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Param => "param",
            Kind::First => "first",
            Kind::Second => "second",
            Kind::Owed => "owed",
            Kind::Usual => "usual",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a checkpoint is of.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Head {
    /// Optimizer steps done.
    pub step: u64,
    /// Of those that trained the run, which wrote it.
    pub generation: u64,
    /// Where in the data the training is, and the key of its random numbers.
    pub position: Position,
    pub shape: Shape,
    /// The run's configuration with its layout and schedules; null when the weights come from elsewhere.
    pub plan: Value,
    #[serde(default)]
    pub carried: Carried,
}

/// Where a training is. Samples, dropout and initial values are functions of the seed and of numbers, so this is
/// all there is to know.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Position {
    /// Of the data, used up.
    pub samples: u64,
    pub seed: u64,
    /// What the samples are of.
    pub data: String,
}

/// All that a checkpoint says of itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u64,
    /// Which wrote it.
    pub program: String,
    #[serde(flatten)]
    pub head: Head,
    pub chunk_bytes: usize,
    /// Of each writer.
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

/// A tensor, and where its pieces lie.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TensorAt {
    pub kind: Kind,
    #[serde(flatten)]
    pub named: Named,
    pub pieces: Vec<PieceAt>,
}

/// A piece of a tensor: f32, little-endian.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PieceAt {
    /// Of `files`.
    pub file: usize,
    /// Its first byte there.
    pub at: u64,
    /// Which elements of the flattened tensor it holds, in order.
    pub runs: Vec<Runs>,
    /// Of what is owed: whether it is one more part of the sum, and not what another rank computed as well.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub counts: bool,
}

fn yes() -> bool {
    true
}

fn is_yes(counts: &bool) -> bool {
    *counts
}

/// What one writer has written.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Written {
    pub file: FileSum,
    pub pieces: Vec<(Piece, u64)>,
}

/// A piece of a tensor, wherever it lies.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Piece {
    pub kind: Kind,
    /// The whole tensor's.
    pub named: Named,
    /// Which of its elements, in order.
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
    /// Of what all writers have written, in their order.
    pub fn of(head: Head, chunk_bytes: usize, parts: Vec<Written>) -> Manifest {
        let (mut files, mut tensors) = (Vec::new(), Vec::<TensorAt>::new());
        let mut index: HashMap<(Kind, String), usize> = HashMap::new();
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

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// As it stands in the file: an object whose first line is the checksum of the rest.
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
        let bytes = std::fs::read(&path).map_err(Error::system("read", &path))?;
        Manifest::parse(&bytes).map_err(|what| Error::corrupt(&path, 0, what))
    }

    fn parse(bytes: &[u8]) -> std::result::Result<Manifest, String> {
        let rest = bytes.strip_prefix(OPENING.as_bytes());
        let (sum, rest) = rest
            .and_then(|rest| rest.split_at_checked(2 * blake3::OUT_LEN))
            .ok_or_else(|| format!("it is no manifest of a {FORMAT}"))?;
        let body = rest.strip_prefix(CLOSING.as_bytes());
        let body = body.ok_or_else(|| format!("it is no manifest of a {FORMAT}"))?;
        if blake3::hash(body).to_hex().as_bytes() != sum {
            return Err("it is not what its checksum is of".into());
        }
        let whole = [b"{", body].concat();
        let told = |error: serde_json::Error| format!("it cannot be read: {error}");
        let value: Value = serde_json::from_slice(&whole).map_err(told)?;
        // Asked before the rest is read: another version may say the rest in another way.
        match (value["format"].as_str(), value["version"].as_u64()) {
            (Some(FORMAT), Some(VERSION)) => serde_json::from_value(value).map_err(told),
            (Some(FORMAT), Some(version)) => Err(format!(
                "it is of version {version}, this program reads version {VERSION}; use the program that wrote it"
            )),
            _ => Err(format!("it does not say that it is a {FORMAT}")),
        }
    }
}

const OPENING: &str = "{\"blake3\":\"";
const CLOSING: &str = "\",\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let shape = lockstep_plan::presets::shape("gpt2-test", Some(64)).expect("a preset");
        let plan = serde_json::json!({"lr": 3e-4});
        let position = Position { samples: 12, seed: 3, data: "grammar".into() };
        let carried = Carried { left_out: 3, learner: serde_json::json!({"policy_version": 7}) };
        let head = Head { step: 4, generation: 2, position, shape, plan, carried };
        let named = Named { name: "embed.tokens".into(), dims: vec![4, 4] };
        let runs = vec![Runs { start: 0, len: 2, stride: 4, count: 4 }];
        let piece = Piece { kind: Kind::Param, named, runs, counts: true };
        let file =
            FileSum { name: "rank-00000.safetensors".into(), bytes: 99, chunks: vec!["ab".into()] };
        Manifest::of(head, CHUNK, vec![Written { file, pieces: vec![(piece, 64)] }])
    }

    #[test]
    fn comes_back_and_is_json() {
        let text = manifest().text();
        assert_eq!(Manifest::parse(text.as_bytes()), Ok(manifest()));
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["tensors"][0]["pieces"][0]["runs"][0], serde_json::json!([0, 2, 4, 4]));
        assert_eq!(value["step"], 4);
    }

    #[test]
    fn every_bit_and_every_length_is_noticed() {
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
    fn other_versions_are_refused() {
        for (change, says) in [
            (Manifest { version: 3, ..manifest() }, "version 3, this program reads version 2"),
            (Manifest { format: "other".into(), ..manifest() }, "does not say that it is a"),
        ] {
            let error = Manifest::parse(change.text().as_bytes()).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
