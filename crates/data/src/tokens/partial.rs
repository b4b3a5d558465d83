//! A file that gets its final name only when it is complete. If the program is killed, no incomplete file appears under
//! that name, and the next run removes the temporary file.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

pub struct Partial {
    /// Locked while it is written, so that other processes do not remove it.
    pub file: File,
    path: PathBuf,
    target: PathBuf,
    published: bool,
}

impl Partial {
    /// Creates the temporary file for `target`.
    pub fn create(target: &Path) -> Result<Partial> {
        let name = target
            .file_name()
            .ok_or_else(|| Error::misuse(format!("{} is not a file name", target.display())))?;
        let prefix = format!(".{}.partial-", name.to_string_lossy());
        remove_abandoned(folder(target), &prefix);
        let path = target.with_file_name(format!("{prefix}{}", std::process::id()));
        loop {
            let file =
                File::options().read(true).write(true).create(true).truncate(true).open(&path);
            let file = file.map_err(Error::system("writing", &path))?;
            file.lock().map_err(Error::system("locking", &path))?;
            // Another process may have removed it before it was locked.
            if path.exists() {
                return Ok(Partial { file, path, target: target.to_path_buf(), published: false });
            }
        }
    }

    /// Syncs the file and renames it to its final name.
    pub fn publish(mut self) -> Result<()> {
        self.file.sync_all().map_err(Error::system("writing", &self.path))?;
        fs::rename(&self.path, &self.target).map_err(Error::system("renaming", &self.target))?;
        self.published = true;
        let folder = folder(&self.target);
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(Error::system("writing", folder))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn folder(target: &Path) -> &Path {
    target.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

/// Removes abandoned temporary files. Errors are ignored: such files only take space.
fn remove_abandoned(folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(prefix));
        if ours && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
