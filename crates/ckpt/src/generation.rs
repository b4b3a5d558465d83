//! Who may write a run's checkpoints: `RUN/generation` holds a number that only grows, and whoever trains the run
//! has one. A rank that was given up and comes back has an older one, and is refused when it would commit.
//! Never waits long: the lock is held while a folder is renamed.

use crate::error::{Error, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

/// Takes this generation for a run; what was older may no longer commit. Refuses one that is older itself.
pub fn claim(run: &Path, generation: u64) -> Result<()> {
    let mut held = Lock::take(run)?;
    let newest = held.read()?;
    match generation < newest {
        true => Err(Error::Fenced { run: run.to_path_buf(), generation, newest }),
        false => held.write(generation),
    }
}

/// Takes the next generation for a run: which.
pub fn advance(run: &Path) -> Result<u64> {
    let mut held = Lock::take(run)?;
    let next = held.read()? + 1;
    held.write(next)?;
    Ok(next)
}

/// The same for one that has the generation `last`: refused when somebody has taken one since.
pub fn succeed(run: &Path, last: u64) -> Result<u64> {
    let mut held = Lock::take(run)?;
    let newest = held.read()?;
    if newest > last {
        return Err(Error::Fenced { run: run.to_path_buf(), generation: last, newest });
    }
    held.write(newest + 1)?;
    Ok(newest + 1)
}

/// The newest generation of a run; 0 when nobody has taken one.
pub fn newest(run: &Path) -> Result<u64> {
    match path(run).exists() {
        true => Lock::take(run)?.read(),
        false => Ok(0),
    }
}

/// The lock, if this generation is the newest: nobody takes a newer one until it is let go.
pub(crate) fn hold(run: &Path, generation: u64) -> Result<Lock> {
    let mut held = Lock::take(run)?;
    let newest = held.read()?;
    match generation < newest {
        true => Err(Error::Fenced { run: run.to_path_buf(), generation, newest }),
        false => Ok(held),
    }
}

/// The file, locked until this is dropped or its process ends.
pub(crate) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    fn take(run: &Path) -> Result<Lock> {
        fs::create_dir_all(run).map_err(Error::system("make the folder", run))?;
        let path = path(run);
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(Error::system("open", &path))?;
        file.lock().map_err(Error::system("lock", &path))?;
        Ok(Lock { file, path })
    }

    fn read(&mut self) -> Result<u64> {
        let mut text = String::new();
        let read = self.file.rewind().and_then(|()| self.file.read_to_string(&mut text));
        read.map_err(Error::system("read", &self.path))?;
        match text.trim() {
            "" => Ok(0),
            digits => digits.parse().map_err(|_| {
                let what =
                    format!("holds {digits:?}, no number; if nobody trains this run, remove it");
                Error::malformed(&self.path, what)
            }),
        }
    }

    /// Always as many bytes, within one sector: there is no torn number.
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
