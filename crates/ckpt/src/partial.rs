//! A folder that appears whole or not at all: filled under a hidden name, synced, renamed.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A folder being filled. Dropped before `commit`, it is removed.
pub(crate) struct Partial {
    hidden: PathBuf,
    target: PathBuf,
    committed: bool,
}

/// How hidden folders end; they begin with a dot and the name of what they are to become.
const SUFFIX: &str = ".partial";

impl Partial {
    /// Starts filling what will be `target`. What an earlier attempt at the same folder left behind is removed:
    /// a run has one writer.
    pub fn begin(target: &Path) -> Result<Partial> {
        if target.exists() {
            return Err(Error::Exists { path: target.to_path_buf() });
        }
        let hidden = hidden(target)?;
        if let Some(parent) = hidden.parent() {
            fs::create_dir_all(parent).map_err(Error::system("make the folder", parent))?;
        }
        if hidden.exists() {
            fs::remove_dir_all(&hidden).map_err(Error::system("remove", &hidden))?;
        }
        fs::create_dir(&hidden).map_err(Error::system("make the folder", &hidden))?;
        Ok(Partial { hidden, target: target.to_path_buf(), committed: false })
    }

    /// Where to write meanwhile.
    pub fn path(&self) -> &Path {
        &self.hidden
    }

    /// Gives the folder its name. Its files have been synced by whoever wrote them; here their entries are, then
    /// the rename itself, so that a folder of this name is whole even after a power cut.
    pub fn commit(mut self) -> Result<PathBuf> {
        sync(&self.hidden)?;
        fs::rename(&self.hidden, &self.target)
            .map_err(Error::system("give the finished folder its name", &self.target))?;
        self.committed = true;
        sync(parent(&self.target))?;
        Ok(self.target.clone())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.committed {
            // Nobody takes it for whole; failing to remove it costs only space.
            let _ = fs::remove_dir_all(&self.hidden);
        }
    }
}

/// Whether this is the name of a folder that is being filled, or that a writer which was killed left behind.
pub(crate) fn is_partial(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(SUFFIX)
}

fn hidden(target: &Path) -> Result<PathBuf> {
    let name = target.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::malformed(target, "is no name for a new folder"))?;
    Ok(parent(target).join(hidden_name(name)))
}

/// What a folder is called while it is being filled.
pub(crate) fn hidden_name(name: &str) -> String {
    format!(".{name}{SUFFIX}")
}

/// `runs` → `.`, whose path is empty.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn sync(folder: &Path) -> Result<()> {
    let sync = File::open(folder).and_then(|folder| folder.sync_all());
    sync.map_err(Error::system("sync", folder))
}
