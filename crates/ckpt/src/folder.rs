//! The checkpoints of a run, as folders: `RUN/checkpoints/step-00000100/`. Which there are, which is the newest,
//! which may go. A folder of this name is whole; what is being filled or removed has another.
//!
//! ```text
//! rank-00003.safetensors   f32: what rank 3 wrote of parameters, moments and what it owed, as KIND/NAME
//! manifest.json            the step, the plan, which runs of which tensor lie where, and checksums
//! ```

use crate::checkpoint::load;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::manifest::MANIFEST;
use crate::partial;
use std::fs;
use std::path::{Path, PathBuf};

/// How the name of a checkpoint ends while it is being removed.
const GOING: &str = ".removed";

/// The newest checkpoint of a run that is whole; None when the run has none at all.
///
/// One that is not whole (a copy that was broken off) is passed over with a warning. When none is whole the error
/// is the newest one's. Chunks are not read here: what is damaged in the middle of a file is told by whoever
/// reads it.
pub fn latest(run: &Path) -> Result<Option<PathBuf>> {
    Ok(before(run, u64::MAX)?.map(|(_, dir)| dir))
}

/// The same of those with fewer than `step` steps done: how many, and where.
pub fn before(run: &Path, step: u64) -> Result<Option<(u64, PathBuf)>> {
    let mut broken = None;
    for done in steps(run).into_iter().filter(|done| *done < step) {
        let dir = folder(run, done);
        match load(&dir) {
            Ok(_) => return Ok(Some((done, dir))),
            Err(error) => {
                tracing::warn!("{} is passed over: {error}", dir.display());
                broken.get_or_insert(error);
            }
        }
    }
    broken.map_or(Ok(None), Err)
}

/// Steps of which a run has checkpoints under their final names, the newest first.
pub fn steps(run: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(checkpoints(run)) else { return Vec::new() };
    let step = |entry: fs::DirEntry| step_of(entry.file_name().to_str()?);
    let mut found: Vec<u64> = entries.flatten().filter_map(step).collect();
    found.sort_unstable_by(|one, other| other.cmp(one));
    found
}

/// Whether a path is a checkpoint itself, and not a run that has some.
pub fn is_checkpoint(path: &Path) -> bool {
    path.join(MANIFEST).exists()
}

/// What a user means by a path: the checkpoint itself, or the newest of the run.
pub fn find(path: &Path) -> Result<PathBuf> {
    if is_checkpoint(path) {
        return Ok(path.to_path_buf());
    }
    latest(path)?.ok_or_else(|| Error::Nothing { path: path.to_path_buf() })
}

/// The same of one step.
pub fn find_step(run: &Path, step: u64) -> Result<PathBuf> {
    let dir = folder(run, step);
    match dir.exists() {
        true => Ok(dir),
        false => Err(Error::NoStep { run: run.to_path_buf(), step, there: steps(run) }),
    }
}

/// Removes what a save or a `prune` that was killed left behind. For those that train the run, before they begin.
pub fn sweep(run: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(checkpoints(run)) else { return Ok(()) };
    let going = |name: &str| name.strip_suffix(GOING).and_then(step_of).is_some();
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| partial::is_partial(name) || going(name)) {
            Disk::default().remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Which checkpoints stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// How many of the newest; 0: all.
    pub newest: usize,
    /// Besides, every step that is a multiple of this; 0: none.
    pub every: u64,
}

/// Removes the others.
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
        disk.rename(&folder(run, *step), &going(run, *step))?;
    }
    // Before anything in them goes: no power cut leaves a part of one under its name.
    disk.sync_folder(&checkpoints(run))?;
    old.iter().try_for_each(|step| disk.remove(&going(run, *step)))
}

pub(crate) fn checkpoints(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

/// Where the checkpoint of a step lies.
pub fn folder(run: &Path, step: u64) -> PathBuf {
    checkpoints(run).join(format!("step-{step:08}"))
}

/// Its name while it goes.
pub(crate) fn going(run: &Path, step: u64) -> PathBuf {
    checkpoints(run).join(format!("step-{step:08}{GOING}"))
}

fn step_of(folder_name: &str) -> Option<u64> {
    folder_name.strip_prefix("step-")?.parse().ok()
}
