//! All writes to the disk go through this file, so that tests can observe, fail or replay each operation. Never reads.

use crate::error::{Error, Result};
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A disk operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskOp<'a> {
    /// The folder may exist already.
    MakeFolder(&'a Path),
    Create(&'a Path),
    /// Appends to the file.
    Write(&'a Path, &'a [u8]),
    SyncFile(&'a Path),
    /// Syncs the directory entries.
    SyncFolder(&'a Path),
    Rename(&'a Path, &'a Path),
    /// Removes recursively.
    Remove(&'a Path),
}

type Hook = dyn Fn(DiskOp<'_>) -> io::Result<()> + Send + Sync;

/// The disk, optionally with a hook that is called before each operation.
#[derive(Clone, Default)]
pub struct Disk {
    hook: Option<Arc<Hook>>,
}

impl Disk {
    /// `hook` is called before each operation and may make it fail.
    pub fn with_hook(hook: impl Fn(DiskOp<'_>) -> io::Result<()> + Send + Sync + 'static) -> Disk {
        Disk { hook: Some(Arc::new(hook)) }
    }

    /// Replaces a file atomically: after a crash it has its old or its new contents.
    pub fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let partial = path.with_file_name(name);
        match fs::remove_file(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::system("remove", &partial)(error));
            }
            _ => {}
        }
        let mut out = self.create(&partial)?;
        out.write(bytes)?;
        out.sync()?;
        self.rename(&partial, path)?;
        match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => self.sync_folder(folder),
            _ => self.sync_folder(Path::new(".")),
        }
    }

    pub(crate) fn make_folder(&self, path: &Path) -> Result<()> {
        let made = self.before(DiskOp::MakeFolder(path)).and_then(|()| fs::create_dir_all(path));
        made.map_err(Error::system("create the folder", path))
    }

    /// Creates a new file for sequential writing.
    pub(crate) fn create(&self, path: &Path) -> Result<Out> {
        let file = self.before(DiskOp::Create(path)).and_then(|()| fs::File::create_new(path));
        let file = file.map_err(Error::system("create", path))?;
        Ok(Out { disk: self.clone(), file, path: path.to_path_buf(), written: 0, started: 0 })
    }

    pub(crate) fn sync_folder(&self, path: &Path) -> Result<()> {
        let sync = || fs::File::open(path)?.sync_all();
        self.before(DiskOp::SyncFolder(path))
            .and_then(|()| sync())
            .map_err(Error::system("sync", path))
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let renamed = self.before(DiskOp::Rename(from, to)).and_then(|()| fs::rename(from, to));
        renamed.map_err(Error::system("rename to", to))
    }

    /// Succeeds if the path does not exist.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        let removed =
            self.before(DiskOp::Remove(path)).and_then(|()| match fs::remove_dir_all(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            });
        removed.map_err(Error::system("remove", path))
    }

    fn before(&self, op: DiskOp<'_>) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(op))
    }
}

/// A file opened for sequential writing.
pub(crate) struct Out {
    disk: Disk,
    file: fs::File,
    path: PathBuf,
    written: u64,
    /// Offset up to which writeback has been started.
    started: u64,
}

/// Bytes after which writeback is started, so that the final sync does not wait for the whole file.
const WRITEBACK_BYTES: u64 = 8 << 20;

impl Out {
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // In pieces, so that writeback of one overlaps with copying the next.
        for piece in bytes.chunks(WRITEBACK_BYTES as usize) {
            let allowed = self.disk.before(DiskOp::Write(&self.path, piece));
            let written = allowed.and_then(|()| self.file.write_all(piece));
            written.map_err(Error::system("write", &self.path))?;
            self.written += piece.len() as u64;
            if self.written - self.started >= WRITEBACK_BYTES {
                self.start_writeback();
            }
        }
        Ok(())
    }

    /// Syncs the file to the disk.
    pub fn sync(self) -> Result<()> {
        let allowed = self.disk.before(DiskOp::SyncFile(&self.path));
        allowed.and_then(|()| self.file.sync_all()).map_err(Error::system("sync", &self.path))
    }

    #[cfg(target_os = "linux")]
    fn start_writeback(&mut self) {
        use std::os::fd::AsRawFd;
        let (from, len) = (self.started as i64, (self.written - self.started) as i64);
        // SAFETY: the descriptor belongs to our open file and no memory is passed. The result is ignored: errors are
        // reported by the sync.
        unsafe {
            libc::sync_file_range(self.file.as_raw_fd(), from, len, libc::SYNC_FILE_RANGE_WRITE)
        };
        self.started = self.written;
    }

    #[cfg(not(target_os = "linux"))]
    fn start_writeback(&mut self) {
        self.started = self.written;
    }
}
