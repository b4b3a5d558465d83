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

/// Retention rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// Number of newest checkpoints to keep; 0 keeps all.
    pub newest: usize,
    /// Also keep every step that is a multiple of this; 0 for none.
    pub every: u64,
}

/// Removes the checkpoints that the rule does not keep.
pub fn prune(disk: &Disk, run: &Path, keep: Keep) -> Result<()> {
    let stays = |step: u64| keep.every > 0 && step.is_multiple_of(keep.every);
    let old: Vec<u64> = match keep.newest {
        0 => Vec::new(),
        newest => steps(run).into_iter().skip(newest).filter(|step| !stays(*step)).collect(),
    };
    if old.is_empty() {
        return Ok(());
    }
    for step in &old {
        disk.rename(&folder(run, *step), &removed_folder(run, *step))?;
    }
    // Sync the renames first, so that a power failure cannot leave a partial checkpoint under its final name.
    disk.sync_folder(&checkpoints(run))?;
    old.iter().try_for_each(|step| disk.remove(&removed_folder(run, *step)))
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
