//! Every change that a save makes to the disk: one small seam, through which a test can watch each act, refuse it,
//! or play it back. Never reads.

use crate::error::{Error, Result};
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is about to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act<'a> {
    /// It may be there already.
    MakeFolder(&'a Path),
    Create(&'a Path),
    /// At the end of the file.
    Write(&'a Path, &'a [u8]),
    SyncFile(&'a Path),
    /// The names in it.
    SyncFolder(&'a Path),
    Rename(&'a Path, &'a Path),
    /// With all that is in it.
    Remove(&'a Path),
}

type Watch = dyn Fn(Act<'_>) -> io::Result<()> + Send + Sync;

/// The disk, or the disk with somebody who watches.
#[derive(Clone, Default)]
pub struct Disk {
    watch: Option<Arc<Watch>>,
}

impl Disk {
    /// `watch` is told of each act before it is done, and may refuse it.
    pub fn watched(watch: impl Fn(Act<'_>) -> io::Result<()> + Send + Sync + 'static) -> Disk {
        Disk { watch: Some(Arc::new(watch)) }
    }

    pub(crate) fn make_folder(&self, path: &Path) -> Result<()> {
        let made = self.told(Act::MakeFolder(path)).and_then(|()| fs::create_dir_all(path));
        made.map_err(Error::system("make the folder", path))
    }

    /// A new file, to be filled from its beginning to its end.
    pub(crate) fn create(&self, path: &Path) -> Result<Out> {
        let file = self.told(Act::Create(path)).and_then(|()| fs::File::create_new(path));
        let file = file.map_err(Error::system("make", path))?;
        Ok(Out { disk: self.clone(), file, path: path.to_path_buf(), written: 0, started: 0 })
    }

    pub(crate) fn sync_folder(&self, path: &Path) -> Result<()> {
        let sync = || fs::File::open(path)?.sync_all();
        self.told(Act::SyncFolder(path)).and_then(|()| sync()).map_err(Error::system("sync", path))
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let renamed = self.told(Act::Rename(from, to)).and_then(|()| fs::rename(from, to));
        renamed.map_err(Error::system("give its name to", to))
    }

    /// What is not there is removed already.
    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        let removed = self.told(Act::Remove(path)).and_then(|()| match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        });
        removed.map_err(Error::system("remove", path))
    }

    fn told(&self, act: Act<'_>) -> io::Result<()> {
        self.watch.as_ref().map_or(Ok(()), |watch| watch(act))
    }
}

/// A file being written.
pub(crate) struct Out {
    disk: Disk,
    file: fs::File,
    path: PathBuf,
    written: u64,
    /// Up to where the disk has been asked to begin.
    started: u64,
}

/// Bytes after which the disk is asked to begin with what it was given. It would wait until memory is full of
/// it, or for the sync, and then we for the disk.
const START: u64 = 8 << 20;

impl Out {
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // In pieces, so that the disk is at work on one while the next is copied.
        for piece in bytes.chunks(START as usize) {
            let told = self.disk.told(Act::Write(&self.path, piece));
            let written = told.and_then(|()| self.file.write_all(piece));
            written.map_err(Error::system("write", &self.path))?;
            self.written += piece.len() as u64;
            if self.written - self.started >= START {
                self.start();
            }
        }
        Ok(())
    }

    /// When this returns, the bytes are on the disk.
    pub fn sync(self) -> Result<()> {
        let told = self.disk.told(Act::SyncFile(&self.path));
        told.and_then(|()| self.file.sync_all()).map_err(Error::system("sync", &self.path))
    }

    #[cfg(target_os = "linux")]
    fn start(&mut self) {
        use std::os::fd::AsRawFd;
        let (from, len) = (self.started as i64, (self.written - self.started) as i64);
        // SAFETY: the descriptor is that of our own open file; the call takes no memory of ours. It is a hint: what
        // it returns does not matter, the sync will tell.
        unsafe {
            libc::sync_file_range(self.file.as_raw_fd(), from, len, libc::SYNC_FILE_RANGE_WRITE)
        };
        self.started = self.written;
    }

    #[cfg(not(target_os = "linux"))]
    fn start(&mut self) {
        self.started = self.written;
    }
}
