//! The checkpoint folders of a run: `RUN/checkpoints/step-00000100/`. A folder with such a name is complete; folders
//! that are being written or removed have other names.
//!
//! ```text
//! rank-00003.safetensors   f32 slices of parameters, moments and residuals written by rank 3, as KIND/NAME
//! manifest.json            step, plan, location of every slice, checksums
//! ```

use crate::checkpoint::load;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::manifest::MANIFEST;
use crate::partial;
use crate::validate::MAX_STEP;
use std::fs;
use std::path::{Path, PathBuf};

/// Suffix of a checkpoint that is being removed.
const REMOVED: &str = ".removed";

/// The newest complete checkpoint of a run; `None` if the run has no checkpoint.
///
/// Incomplete checkpoints (for example an interrupted copy) are skipped with a warning. If all are incomplete, returns
/// the error of the newest. Chunks are not verified here; corruption inside a file is reported when it is read.
pub fn latest(run: &Path) -> Result<Option<PathBuf>> {
    Ok(before(run, u64::MAX)?.map(|(_, dir)| dir))
}

/// The newest complete checkpoint before `step`, and its step.
pub fn before(run: &Path, step: u64) -> Result<Option<(u64, PathBuf)>> {
    let mut broken = None;
    for done in steps(run).into_iter().filter(|done| *done < step) {
        let dir = folder(run, done);
        match load(&dir) {
            Ok(_) => return Ok(Some((done, dir))),
            Err(error) => {
                tracing::warn!("skipped {}: {error}", dir.display());
                broken.get_or_insert(error);
            }
        }
    }
    broken.map_or(Ok(None), Err)
}

/// Steps of the checkpoints of a run, newest first.
pub fn steps(run: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(checkpoints(run)) else { return Vec::new() };
    let step = |entry: fs::DirEntry| step_of(entry.file_name().to_str()?);
    let mut found: Vec<u64> = entries.flatten().filter_map(step).collect();
    found.sort_unstable_by(|one, other| other.cmp(one));
    found
}

/// Step of the newest complete checkpoint written by `generation` or a later one; 0 if there is none. Checkpoints that
/// were there before, of which some may be corrupt, do not count.
pub fn progress_since(run: &Path, generation: u64) -> u64 {
    let is_new = |step: &u64| {
        load(&folder(run, *step)).is_ok_and(|found| found.head().generation >= generation)
    };
    steps(run).into_iter().find(is_new).unwrap_or(0)
}

/// Whether a path is a checkpoint rather than a run folder.
pub fn is_checkpoint(path: &Path) -> bool {
    path.join(MANIFEST).exists()
}

/// Resolves a path: the checkpoint itself, or the newest checkpoint of a run.
pub fn find(path: &Path) -> Result<PathBuf> {
    if is_checkpoint(path) {
        return Ok(path.to_path_buf());
    }
    latest(path)?.ok_or_else(|| Error::NotFound { path: path.to_path_buf() })
}

/// The run folder of a checkpoint, if it is in one.
pub fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let dir = checkpoint.canonicalize().ok()?;
    let checkpoints = dir.parent().filter(|parent| parent.ends_with("checkpoints"))?;
    checkpoints.parent().map(Path::to_path_buf)
}

/// The checkpoint of a step.
pub fn find_step(run: &Path, step: u64) -> Result<PathBuf> {
    let dir = folder(run, step);
    match dir.exists() {
        true => Ok(dir),
        false => Err(Error::NoStep { run: run.to_path_buf(), step, existing: steps(run) }),
    }
}

/// Removes the remains of interrupted saves and removals. Called before training starts.
pub fn sweep(run: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(checkpoints(run)) else { return Ok(()) };
    let removed = |name: &str| name.strip_suffix(REMOVED).and_then(step_of).is_some();
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| partial::is_partial(name) || removed(name)) {
            Disk::default().remove(&entry.path())?;
        }
    }
    Ok(())
}

pub(crate) fn checkpoints(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

/// Folder of the checkpoint of a step.
pub fn folder(run: &Path, step: u64) -> PathBuf {
    checkpoints(run).join(format!("step-{step:08}"))
}

/// Its name while it is being removed.
pub(crate) fn removed_folder(run: &Path, step: u64) -> PathBuf {
    checkpoints(run).join(format!("step-{step:08}{REMOVED}"))
}

fn step_of(folder_name: &str) -> Option<u64> {
    folder_name.strip_prefix("step-")?.parse().ok().filter(|step| *step <= MAX_STEP)
}
