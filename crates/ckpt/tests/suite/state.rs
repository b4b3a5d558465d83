//! The state of a small training whose every number follows from its step, saved by the ranks of any mesh.

use lockstep_ckpt::{
    Checkpoint, Disk, DiskOp, ExtraState, Head, Keep, Manifest, Named, Piece, Position, Result,
    TensorKind, begin, commit, load, params_of, prune, write_pieces,
};
use lockstep_plan::Mesh;
use lockstep_plan::model::{Part, Runs, Shape};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

pub const KINDS: [TensorKind; 3] = [TensorKind::Param, TensorKind::First, TensorKind::Second];

/// Small, with every kind of cut in it.
pub fn shape() -> Shape {
    let preset = lockstep_plan::presets::shape("gpt2-test", Some(30)).expect("a preset is a model");
    Shape { dim: 16, layers: 2, heads: 4, kv_heads: 4, head_dim: 4, ffn: 32, seq: 8, ..preset }
}

/// Four ranks: matrices are cut by columns and rows, states among replicas.
pub fn mesh() -> Mesh {
    Mesh { data: 2, tensor: 2, shard: 2, ..Mesh::ONE }
}

/// An element: other for every step, kind, tensor and place.
pub fn value(step: u64, kind: TensorKind, name: &str, element: usize) -> f32 {
    let spelled = |hash: u64, byte| hash.wrapping_mul(31).wrapping_add(u64::from(byte));
    let key = [step, kind as u64, name.bytes().fold(7, spelled), element as u64];
    let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, part| {
        (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    (hash >> 40) as f32 / 1024.0 - 8192.0
}

pub fn head(step: u64, generation: u64) -> Head {
    let data = "made up".into();
    let position = Position { samples: 8 * step, seed: 1, data, first_batch_used: true };
    let plan = serde_json::json!({"name": "test", "lr": 3e-4});
    Head { step, generation, position, shape: shape(), plan, extra: ExtraState::default() }
}

/// The pieces that a rank of a mesh writes.
pub fn pieces(mesh: &Mesh, rank: usize) -> Vec<Piece> {
    let part = Part::new(mesh, mesh.coord(rank), 1, shape().blocks());
    let piece = |kind| {
        move |slice: lockstep_plan::model::Slice| {
            let named = Named { name: slice.name, dims: slice.dims };
            Piece { kind, named, runs: slice.runs, counts: true }
        }
    };
    KINDS.into_iter().flat_map(|kind| part.written().into_iter().map(piece(kind))).collect()
}

fn values(step: u64, piece: &Piece) -> Vec<f32> {
    let elements = piece.runs.iter().flat_map(|runs| runs.ranges()).flatten();
    elements.map(|element| value(step, piece.kind, &piece.named.name, element)).collect()
}

/// All ranks of the mesh write, one after the other, and the first commits and prunes.
pub fn save_by(disk: &Disk, run: &Path, mesh: &Mesh, head: &Head, keep: Keep) -> Result<PathBuf> {
    const CHUNK: usize = 1000;
    let mut parts = Vec::new();
    for rank in 0..mesh.ranks() {
        let folder = begin(disk, run, head.step, head.generation)?;
        let pieces = pieces(mesh, rank);
        parts.push(write_pieces(disk, &folder, rank, &pieces, CHUNK, |number| {
            Ok(Cow::Owned(values(head.step, &pieces[number])))
        })?);
    }
    let path = commit(disk, run, &Manifest::of(head.clone(), CHUNK, parts))?;
    prune(disk, run, keep)?;
    Ok(path)
}

/// The same without a hook, keeping all checkpoints.
pub fn saved(run: &Path, step: u64) -> PathBuf {
    let all = Keep { newest: 0, every: 0 };
    save_by(&Disk::default(), run, &mesh(), &head(step, 0), all).expect("saved")
}

/// Every number of a checkpoint is its step's.
#[track_caller]
pub fn holds(checkpoint: &Checkpoint, step: u64) {
    assert_eq!(checkpoint.head().step, step);
    for kind in KINDS {
        for named in params_of(&shape()) {
            let mut found = vec![0.0; named.len()];
            let whole = [Runs::one(0..named.len())];
            checkpoint.read(kind, &named.name, &whole, &mut found).expect("it can be read");
            for (element, found) in found.iter().enumerate() {
                let wanted = value(step, kind, &named.name, element);
                assert!(found.to_bits() == wanted.to_bits(), "{kind} {} [{element}]", named.name);
            }
        }
    }
}

/// Opens a checkpoint and reads all of it: what is wrong with it.
pub fn wrong_with(dir: &Path) -> Vec<lockstep_ckpt::Error> {
    match load(dir) {
        Ok(checkpoint) => checkpoint.check(|_| {}),
        Err(error) => vec![error],
    }
}

/// An owned disk operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kept {
    MakeFolder(PathBuf),
    Create(PathBuf),
    Write(PathBuf, Vec<u8>),
    SyncFile(PathBuf),
    SyncFolder(PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl From<DiskOp<'_>> for Kept {
    fn from(act: DiskOp<'_>) -> Kept {
        match act {
            DiskOp::MakeFolder(path) => Kept::MakeFolder(path.into()),
            DiskOp::Create(path) => Kept::Create(path.into()),
            DiskOp::Write(path, bytes) => Kept::Write(path.into(), bytes.into()),
            DiskOp::SyncFile(path) => Kept::SyncFile(path.into()),
            DiskOp::SyncFolder(path) => Kept::SyncFolder(path.into()),
            DiskOp::Rename(from, to) => Kept::Rename(from.into(), to.into()),
            DiskOp::Remove(path) => Kept::Remove(path.into()),
        }
    }
}
