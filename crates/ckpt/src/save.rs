//! Saves a checkpoint: every rank writes its file into a hidden folder, then one rank commits. Readers see a complete
//! checkpoint or none.
//!
//! ```text
//! each writer   .step-00000100.g2.partial/rank-N.safetensors   written, synced
//! then one      .step-00000100.g2.partial/manifest.json        written, synced; the folder synced
//!               renamed to step-00000100                       under the lock of the generation
//!               checkpoints/                                   synced
//! ```

use crate::disk::Disk;
use crate::error::{Error, Result, reject};
use crate::extra_state::ExtraState;
use crate::folder::{checkpoints, folder, removed_folder};
use crate::generation;
use crate::manifest::{CHUNK, Head, MANIFEST, Manifest, Piece, Position, TensorKind};
use crate::partial;
use crate::run_lock::RunLock;
use crate::tensors::{Tensors, differences, params_of};
use crate::writer::write_pieces;
use lockstep_plan::model::{Runs, Shape};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Hidden folder of a step. Each generation has its own, so that an old process cannot write into a new checkpoint.
pub fn partial_folder(run: &Path, step: u64, generation: u64) -> PathBuf {
    checkpoints(run).join(partial::hidden_name(&format!("step-{step:08}.g{generation}")))
}

/// Creates the hidden folder; every writer may call it.
pub fn begin(disk: &Disk, run: &Path, step: u64, generation: u64) -> Result<PathBuf> {
    let (parent, partial) = (checkpoints(run), partial_folder(run, step, generation));
    if !parent.exists() {
        disk.make_folder(&parent)?;
        disk.sync_folder(run)?;
    }
    disk.make_folder(&partial)?;
    Ok(partial)
}

/// Renames the complete folder to its final name and returns it. Fails if a newer generation trains the run. An older
/// checkpoint of the same step is replaced.
pub fn commit(disk: &Disk, run: &Path, manifest: &Manifest) -> Result<PathBuf> {
    let Head { step, generation, .. } = manifest.head;
    let partial = partial_folder(run, step, generation);
    let mut out = disk.create(&partial.join(MANIFEST))?;
    out.write(manifest.text().as_bytes())?;
    out.sync()?;
    disk.sync_folder(&partial)?;

    let (parent, target, aside) = (checkpoints(run), folder(run, step), removed_folder(run, step));
    let lock = generation::hold(run, generation)?;
    let replaced = target.exists();
    if replaced {
        disk.remove(&aside)?;
        disk.rename(&target, &aside)?;
        disk.sync_folder(&parent)?;
    }
    disk.rename(&partial, &target)?;
    disk.sync_folder(&parent)?;
    drop(lock);
    if replaced && let Err(error) = disk.remove(&aside) {
        // The checkpoint is valid; the next start removes the rest.
        tracing::warn!("{error}");
    }
    Ok(target)
}

/// Removes the hidden folder of a failed save. If this fails, the next start of the run removes it.
pub fn abandon(disk: &Disk, run: &Path, step: u64, generation: u64) {
    if let Err(error) = disk.remove(&partial_folder(run, step, generation)) {
        tracing::warn!("{error}");
    }
}

/// Saves imported weights as the checkpoint of step 0. Never overwrites; fails if another process uses the run.
pub fn save(run: &Path, shape: &Shape, params: &dyn Tensors) -> Result<PathBuf> {
    let target = folder(run, 0);
    reject(&target, differences(params.list(), &params_of(shape)))?;
    if target.exists() {
        return Err(Error::Exists { path: target });
    }
    let _lock = RunLock::take(run)?;
    let (disk, generation) = (Disk::default(), generation::newest(run)?);
    let piece = |named: &crate::Named| Piece {
        kind: TensorKind::Param,
        named: named.clone(),
        runs: vec![Runs::one(0..named.len())],
        counts: true,
    };
    let pieces: Vec<Piece> = params_of(shape).iter().map(piece).collect();
    // Remove the remains of an interrupted import.
    disk.remove(&partial_folder(run, 0, generation))?;
    let folder = begin(&disk, run, 0, generation)?;
    // Removes the folder on an error or a panic while tensors are read.
    let guard = Abandon { disk: &disk, run, generation };
    let written = write_pieces(&disk, &folder, 0, &pieces, CHUNK, |number| {
        let named = &pieces[number].named;
        let mut values = vec![0.0; named.len()];
        params.read(&named.name, &mut values)?;
        Ok(Cow::Owned(values))
    })?;
    let (position, plan) = (Position::default(), serde_json::Value::Null);
    let extra = ExtraState::default();
    let head = Head { step: 0, generation, position, shape: shape.clone(), plan, extra };
    let path = commit(&disk, run, &Manifest::of(head, CHUNK, vec![written]))?;
    std::mem::forget(guard);
    Ok(path)
}

struct Abandon<'a> {
    disk: &'a Disk,
    run: &'a Path,
    generation: u64,
}

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        abandon(self.disk, self.run, 0, self.generation);
    }
}
