//! A folder that appears complete or not at all: written under a hidden name, synced, renamed.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A folder being written. It is removed if dropped before `commit`.
pub(crate) struct Partial {
    hidden: PathBuf,
    target: PathBuf,
    committed: bool,
}

/// Suffix of hidden folders; their name starts with a dot and the final name.
const SUFFIX: &str = ".partial";

impl Partial {
    /// Starts writing `target`. The remains of an earlier attempt are removed.
    pub fn begin(target: &Path) -> Result<Partial> {
        if target.exists() {
            return Err(Error::Exists { path: target.to_path_buf() });
        }
        let hidden = hidden(target)?;
        if let Some(parent) = hidden.parent() {
            fs::create_dir_all(parent).map_err(Error::system("create the folder", parent))?;
        }
        if hidden.exists() {
            fs::remove_dir_all(&hidden).map_err(Error::system("remove", &hidden))?;
        }
        fs::create_dir(&hidden).map_err(Error::system("create the folder", &hidden))?;
        Ok(Partial { hidden, target: target.to_path_buf(), committed: false })
    }

    /// The hidden folder.
    pub fn path(&self) -> &Path {
        &self.hidden
    }

    /// Renames the folder to its final name. The files are already synced; the directory entries and the rename are
    /// synced here, so the folder is complete even after a power failure.
    pub fn commit(mut self) -> Result<PathBuf> {
        sync(&self.hidden)?;
        fs::rename(&self.hidden, &self.target)
            .map_err(Error::system("rename the finished folder to", &self.target))?;
        self.committed = true;
        sync(parent(&self.target))?;
        Ok(self.target.clone())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.committed {
            // A remaining folder only takes space.
            let _ = fs::remove_dir_all(&self.hidden);
        }
    }
}

/// Whether this is the name of a hidden folder.
pub(crate) fn is_partial(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(SUFFIX)
}

fn hidden(target: &Path) -> Result<PathBuf> {
    let name = target.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| Error::malformed(target, "not a valid folder name"))?;
    Ok(parent(target).join(hidden_name(name)))
}

/// Hidden name of a folder.
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
