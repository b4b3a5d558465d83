//! `RUN/lock`: held by the process that trains a run, so that a second one is refused. Does not fence old processes;
//! `generation` does.
//!
//! The file is locked with flock, which ends with its holder, also when it is killed. NFS forwards such locks to the
//! server (and drops them when a client's lease expires), but some file systems have none or keep them local to a host.
//! The holder therefore also rewrites its record every second. A record of another host is outdated when it does not
//! change for a while; clocks are not compared.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A record of another host that does not change for this long is outdated.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(15);

/// The process that uses a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Holder {
    pub host: String,
    pub pid: u32,
    /// Seconds since 1970.
    pub started: u64,
    /// Identifies the running kernel. Processes with the same one see each other's locks on every file system.
    boot: String,
    /// Incremented at each heartbeat.
    beat: u64,
}

impl Holder {
    fn this_process() -> Holder {
        let read = |path| fs::read_to_string(path).unwrap_or_default().trim().to_string();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Holder {
            host: read("/proc/sys/kernel/hostname"),
            pid: std::process::id(),
            started: now.as_secs(),
            boot: read("/proc/sys/kernel/random/boot_id"),
            beat: 0,
        }
    }

    fn is_on_this_host(&self) -> bool {
        self.boot == Holder::this_process().boot
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let minutes = now.as_secs().saturating_sub(self.started) / 60;
        write!(f, "process {} on host {} (started {minutes} min ago)", self.pid, self.host)
    }
}

/// The lock of a run folder. Dropping it releases the run.
#[derive(Debug)]
pub struct RunLock {
    path: PathBuf,
    file: File,
    stop: Option<Sender<()>>,
    heartbeat: Option<JoinHandle<()>>,
}

impl RunLock {
    /// Locks a run folder, which is created if it does not exist. Fails with [`Error::InUse`] if another process uses
    /// the run. Waits for up to 15 s if the last holder was on another host and did not release it.
    pub fn take(run: &Path) -> Result<RunLock> {
        RunLock::take_after(run, HEARTBEAT_TIMEOUT)
    }

    /// [`RunLock::take`] with another time after which a record is outdated.
    pub fn take_after(run: &Path, timeout: Duration) -> Result<RunLock> {
        fs::create_dir_all(run).map_err(Error::system("create the folder", run))?;
        let path = run.join("lock");
        let failed = |error| Error::system("lock", &path)(error);
        loop {
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    let locked = lock(&file).map_err(failed)?;
                    // Another process may have taken the new file for an abandoned one.
                    if locked != Locked::ByOther && is_at(&file, &path) {
                        return RunLock::start(path, file);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    remove_if_abandoned(run, &path, timeout)?
                }
                Err(error) => return Err(failed(error)),
            }
        }
    }

    fn start(path: PathBuf, file: File) -> Result<RunLock> {
        let failed = Error::system("write", &path);
        let mut holder = Holder::this_process();
        let mut record = file.try_clone().map_err(Error::system("write", &path))?;
        write(&mut record, &holder).map_err(failed)?;
        let (stop, stopped) = channel();
        let beat = move || {
            while stopped.recv_timeout(HEARTBEAT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                holder.beat += 1;
                // A missed heartbeat matters only if many are missed.
                let _ = write(&mut record, &holder);
            }
        };
        let heartbeat =
            without_signals(|| std::thread::Builder::new().name("run-lock".into()).spawn(beat));
        let heartbeat = heartbeat.map_err(Error::system("start the heartbeat of", &path))?;
        Ok(RunLock { path, file, stop: Some(stop), heartbeat: Some(heartbeat) })
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(heartbeat) = self.heartbeat.take() {
            let _ = heartbeat.join();
        }
        // The folder may have been moved, or another process may have taken over after this one was suspended.
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the lock of a process that has ended. Fails if it is alive.
fn remove_if_abandoned(run: &Path, path: &Path, timeout: Duration) -> Result<()> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file.map_err(Error::system("open", path))?,
    };
    let in_use = |holder| Err(Error::InUse { run: run.to_path_buf(), holder });
    let holder = read(path);
    let alive = match lock(&file).map_err(Error::system("lock", path))? {
        Locked::ByOther => return in_use(holder),
        // An empty record was never completed.
        Locked::ByUs if holder.as_ref().is_none_or(Holder::is_on_this_host) => false,
        Locked::ByUs | Locked::Unsupported => changes(path, timeout),
    };
    if alive {
        return in_use(read(path));
    }
    match is_at(&file, path) {
        true => fs::remove_file(path).map_err(Error::system("remove", path)),
        false => Ok(()),
    }
}

#[derive(PartialEq)]
enum Locked {
    ByUs,
    ByOther,
    /// The file system has no locks.
    Unsupported,
}

fn lock(file: &File) -> io::Result<Locked> {
    match file.try_lock() {
        Ok(()) => Ok(Locked::ByUs),
        Err(TryLockError::WouldBlock) => Ok(Locked::ByOther),
        Err(TryLockError::Error(error)) => match error.raw_os_error() {
            Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOLCK | libc::EINVAL) => {
                Ok(Locked::Unsupported)
            }
            _ => Err(error),
        },
    }
}

/// Whether the record changes within `timeout`. A file that disappears was released.
fn changes(path: &Path, timeout: Duration) -> bool {
    let (first, deadline) = (read(path), Instant::now() + timeout);
    if let Some(holder) = &first {
        tracing::warn!(
            "{} was not released by {holder}; waiting {} s for a heartbeat",
            path.display(),
            timeout.as_secs()
        );
    }
    while Instant::now() < deadline {
        std::thread::sleep(HEARTBEAT_INTERVAL.min(timeout) / 4);
        match read(path) {
            None if !path.exists() => return false,
            now if now != first => return true,
            _ => {}
        }
    }
    false
}

/// Whether `path` is this file, and not one that has replaced it.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Opened anew each time: NFS shows the writes of other hosts at open.
fn read(path: &Path) -> Option<Holder> {
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(4096).read_to_string(&mut text)).ok()?;
    serde_json::from_str(&text).ok()
}

fn write(file: &mut File, holder: &Holder) -> io::Result<()> {
    // The record only grows, by the digits of its counter, so nothing of the old one is left behind it.
    let text = serde_json::to_string(holder).expect("plain data");
    file.rewind()?;
    file.write_all(text.as_bytes())?;
    file.sync_data()
}

/// Runs `start` with all signals blocked, so that a thread that it starts receives none: the signals of a launcher are
/// meant for the thread that waits for them.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are valid locals, and the old mask is restored.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let started = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started
    }
}
