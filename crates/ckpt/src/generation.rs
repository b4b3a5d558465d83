//! Fencing of old processes. `RUN/generation` contains a number that only grows. Each start of the ranks takes a new
//! one, and a process of an older generation may not commit a checkpoint. The lock is held only during a rename.

use crate::error::{Error, Result};
use crate::regular;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

/// Registers a generation. Fails if a newer one exists.
pub fn claim(run: &Path, generation: u64) -> Result<()> {
    let mut lock = Lock::take(run)?;
    let newest = lock.read()?;
    match generation < newest {
        true => Err(Error::Fenced { run: run.to_path_buf(), generation, newest }),
        false => lock.write(generation),
    }
}

/// Registers and returns the next generation.
pub fn advance(run: &Path) -> Result<u64> {
    let mut lock = Lock::take(run)?;
    let newest = lock.read()?;
    lock.next(newest)
}

/// Registers and returns the generation after `last`. Fails if another process registered one in the meantime.
pub fn advance_from(run: &Path, last: u64) -> Result<u64> {
    let mut lock = Lock::take(run)?;
    let newest = lock.read()?;
    if newest > last {
        return Err(Error::Fenced { run: run.to_path_buf(), generation: last, newest });
    }
    lock.next(newest)
}

/// The newest generation of a run, 0 if there is none.
pub fn newest(run: &Path) -> Result<u64> {
    match path(run).exists() {
        true => Lock::take(run)?.read(),
        false => Ok(0),
    }
}

/// Locks the file if `generation` is the newest. No newer one can be registered until the lock is dropped.
pub(crate) fn hold(run: &Path, generation: u64) -> Result<Lock> {
    let mut lock = Lock::take(run)?;
    let newest = lock.read()?;
    match generation < newest {
        true => Err(Error::Fenced { run: run.to_path_buf(), generation, newest }),
        false => Ok(lock),
    }
}

/// Bytes that are read of the file, which has 21.
const MAX_BYTES: u64 = 64;

/// The locked file. The lock is released on drop or when the process ends.
pub(crate) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    fn take(run: &Path) -> Result<Lock> {
        fs::create_dir_all(run).map_err(Error::system("create the folder", run))?;
        let path = path(run);
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.and_then(regular::check).map_err(Error::system("open", &path))?;
        file.lock().map_err(Error::system("lock", &path))?;
        Ok(Lock { file, path })
    }

    fn read(&mut self) -> Result<u64> {
        let mut text = String::new();
        let read = self.file.rewind();
        let read = read.and_then(|()| (&self.file).take(MAX_BYTES).read_to_string(&mut text));
        read.map_err(Error::system("read", &self.path))?;
        match text.trim() {
            "" => Ok(0),
            digits => digits.parse().map_err(|_| {
                let what =
                    format!("expected a number, found {digits:?}; remove the file if no process trains this run");
                Error::malformed(&self.path, what)
            }),
        }
    }

    /// Registers and returns the generation after `newest`.
    fn next(&mut self, newest: u64) -> Result<u64> {
        let next = newest.checked_add(1).ok_or_else(|| {
            let what = format!("generation {newest} is the largest number; remove the file");
            Error::malformed(&self.path, what)
        })?;
        self.write(next)?;
        Ok(next)
    }

    /// Always the same number of bytes within one sector, so a write is atomic.
    fn write(&mut self, generation: u64) -> Result<()> {
        let text = format!("{generation:020}\n");
        let written = self.file.rewind().and_then(|()| self.file.write_all(text.as_bytes()));
        let written = written.and_then(|()| self.file.sync_all());
        written.map_err(Error::system("write", &self.path))
    }
}

fn path(run: &Path) -> PathBuf {
    run.join("generation")
}
