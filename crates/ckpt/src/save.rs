//! Saving: every writer fills its file in a hidden folder, then one of them commits. A reader sees a whole
//! checkpoint or none, and what was there before stays until then.
//!
//! ```text
//! each writer   .step-00000100.g2.partial/rank-N.safetensors   written, synced
//! then one      .step-00000100.g2.partial/manifest.json        written, synced; the folder synced
//!               renamed to step-00000100                       under the lock of the generation
//!               checkpoints/                                   synced
//! ```

use crate::carried::Carried;
use crate::disk::Disk;
use crate::error::{Error, Result, refuse};
use crate::folder::{checkpoints, folder, going};
use crate::generation;
use crate::manifest::{CHUNK, Head, Kind, MANIFEST, Manifest, Piece, Position};
use crate::partial;
use crate::tensors::{Tensors, differences, params_of};
use crate::writer::write_pieces;
use lockstep_plan::model::{Runs, Shape};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The folder that is filled for a step. Each generation has its own: what one that was given up still writes
/// gets into no other's.
pub fn partial_folder(run: &Path, step: u64, generation: u64) -> PathBuf {
    checkpoints(run).join(partial::hidden_name(&format!("step-{step:08}.g{generation}")))
}

/// Makes it; every writer may.
pub fn begin(disk: &Disk, run: &Path, step: u64, generation: u64) -> Result<PathBuf> {
    let (parent, partial) = (checkpoints(run), partial_folder(run, step, generation));
    if !parent.exists() {
        disk.make_folder(&parent)?;
        disk.sync_folder(run)?;
    }
    disk.make_folder(&partial)?;
    Ok(partial)
}

/// Gives a folder, which all writers have filled, its name: where it is. Refuses when the run has been taken over
/// by a newer generation. What lay there under the same step, broken or of a course that was left, is removed.
pub fn commit(disk: &Disk, run: &Path, manifest: &Manifest) -> Result<PathBuf> {
    let Head { step, generation, .. } = manifest.head;
    let partial = partial_folder(run, step, generation);
    let mut out = disk.create(&partial.join(MANIFEST))?;
    out.write(manifest.text().as_bytes())?;
    out.sync()?;
    disk.sync_folder(&partial)?;

    let (parent, target, aside) = (checkpoints(run), folder(run, step), going(run, step));
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
        // The checkpoint stands; the next start sweeps.
        tracing::warn!("{error}");
    }
    Ok(target)
}

/// Removes what a save that failed has left. What cannot be removed is swept by the next start of the run.
pub fn abandon(disk: &Disk, run: &Path, step: u64, generation: u64) {
    if let Err(error) = disk.remove(&partial_folder(run, step, generation)) {
        tracing::warn!("{error}");
    }
}

/// A first checkpoint of weights from elsewhere, by a world of one: step 0. Never overwrites.
pub fn save(run: &Path, shape: &Shape, params: &dyn Tensors) -> Result<PathBuf> {
    let target = folder(run, 0);
    refuse(&target, differences(params.list(), &params_of(shape)))?;
    if target.exists() {
        return Err(Error::Exists { path: target });
    }
    let (disk, generation) = (Disk::default(), generation::newest(run)?);
    let piece = |named: &crate::Named| Piece {
        kind: Kind::Param,
        named: named.clone(),
        runs: vec![Runs::one(0..named.len())],
        counts: true,
    };
    let pieces: Vec<Piece> = params_of(shape).iter().map(piece).collect();
    // What an import that was killed has left.
    disk.remove(&partial_folder(run, 0, generation))?;
    let folder = begin(&disk, run, 0, generation)?;
    // Removed again when this is left early, by an error or by a panic of whoever reads the tensors.
    let guard = Abandon { disk: &disk, run, generation };
    let written = write_pieces(&disk, &folder, 0, &pieces, CHUNK, |number| {
        let named = &pieces[number].named;
        let mut values = vec![0.0; named.len()];
        params.read(&named.name, &mut values)?;
        Ok(Cow::Owned(values))
    })?;
    let (position, plan) = (Position::default(), serde_json::Value::Null);
    let carried = Carried::default();
    let head = Head { step: 0, generation, position, shape: shape.clone(), plan, carried };
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
