//! A file that gets its name only when it is whole. Whatever ends the program before that, no half file
//! stands under the name; what a killed program left beside it is removed by the next one.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

pub struct Partial {
    /// Locked as long as it is written, so that others know it is not left over.
    pub file: File,
    path: PathBuf,
    target: PathBuf,
    published: bool,
}

impl Partial {
    /// Opens the file that will be `target`.
    pub fn create(target: &Path) -> Result<Partial> {
        let name = target
            .file_name()
            .ok_or_else(|| Error::misuse(format!("{} is no name for a file", target.display())))?;
        let prefix = format!(".{}.partial-", name.to_string_lossy());
        remove_left_over(folder(target), &prefix);
        let path = target.with_file_name(format!("{prefix}{}", std::process::id()));
        loop {
            let file =
                File::options().read(true).write(true).create(true).truncate(true).open(&path);
            let file = file.map_err(Error::system("writing", &path))?;
            file.lock().map_err(Error::system("locking", &path))?;
            // Somebody may have taken it for left over before it was locked.
            if path.exists() {
                return Ok(Partial { file, path, target: target.to_path_buf(), published: false });
            }
        }
    }

    /// Makes the whole file stand under its name, on the disk.
    pub fn publish(mut self) -> Result<()> {
        self.file.sync_all().map_err(Error::system("writing", &self.path))?;
        fs::rename(&self.path, &self.target).map_err(Error::system("naming", &self.target))?;
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

/// A failure here is not worth stopping for: the files only take room.
fn remove_left_over(folder: &Path, prefix: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(prefix));
        if ours && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
