//! Where a rank's output goes: to its log file, to the last lines kept for a report, and to the
//! terminal. Never loses or mixes lines, and never fails a rank because a terminal went away.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::lines::Lines;
use super::sys;

/// Whose output is seen on the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// Rank 0's, as it comes, so that progress bars work.
    RankZero,
    /// Everyone's, in whole lines with the rank before each: `[3] line`.
    All,
    Nothing,
}

const TAIL_LINES: usize = 20;

/// One rank's log of one generation.
pub(super) struct RankLog {
    pub path: PathBuf,
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    tail: VecDeque<String>,
    broken: bool,
}

impl RankLog {
    /// Opens `DIR/rank-3.log` to append, under a line that names the generation.
    pub fn open(dir: &Path, rank: usize, generation: u32) -> io::Result<RankLog> {
        fs::create_dir_all(dir)?;
        let path = dir.join(format!("rank-{rank}.log"));
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "--- generation {generation} ---")?;
        let inner = Inner { file, tail: VecDeque::with_capacity(TAIL_LINES), broken: false };
        Ok(RankLog { path, inner: Mutex::new(inner) })
    }

    pub fn tail(&self) -> Vec<String> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.tail.iter().cloned().collect()
    }

    fn append(&self, line: &[u8]) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.tail.len() == TAIL_LINES {
            inner.tail.pop_front();
        }
        inner.tail.push_back(String::from_utf8_lossy(line).into_owned());
        // A full disk is worth one warning; the training goes on.
        if let Err(error) = inner.file.write_all(&[line, b"\n"].concat())
            && !inner.broken
        {
            inner.broken = true;
            tracing::warn!("cannot write {}: {error}", self.path.display());
        }
    }
}

/// One of a rank's two output streams.
#[derive(Clone, Copy)]
enum Stream {
    Out,
    Err,
}

/// How one rank's lines look on the terminal.
#[derive(Clone, Copy)]
pub(super) enum View {
    Raw,
    Prefixed(usize),
    Hidden,
}

impl View {
    pub fn of(show: Show, rank: usize) -> View {
        match show {
            Show::All => View::Prefixed(rank),
            Show::RankZero if rank == 0 => View::Raw,
            Show::RankZero | Show::Nothing => View::Hidden,
        }
    }
}

/// Moves a rank's output to where it goes, on a thread of its own, until both streams end. `done`
/// is dropped then.
pub(super) fn pump(
    out: ChildStdout,
    err: ChildStderr,
    view: View,
    log: Arc<RankLog>,
    done: Sender<()>,
) -> io::Result<()> {
    let move_all = move || {
        let _done = done;
        let mut out = Pump::new(out, Stream::Out, view);
        let mut err = Pump::new(err, Stream::Err, view);
        while out.fd().is_some() || err.fd().is_some() {
            // Looked at first and read last: what was printed before an error stands before it.
            let Ok([err_ready, out_ready]) = sys::wait_readable([err.fd(), out.fd()]) else {
                break;
            };
            if out_ready {
                out.move_some(&log);
            }
            if err_ready {
                err.move_some(&log);
            }
        }
    };
    thread::Builder::new().name("rank-output".into()).spawn(move_all)?;
    Ok(())
}

/// One stream on its way.
struct Pump<From> {
    /// None once it ended.
    from: Option<From>,
    stream: Stream,
    view: View,
    lines: Lines,
    /// As large as a pipe, so that one read empties it.
    buffer: Vec<u8>,
}

impl<From: Read + AsRawFd> Pump<From> {
    fn new(from: From, stream: Stream, view: View) -> Self {
        Pump { from: Some(from), stream, view, lines: Lines::default(), buffer: vec![0; 64 * 1024] }
    }

    fn fd(&self) -> Option<RawFd> {
        self.from.as_ref().map(AsRawFd::as_raw_fd)
    }

    fn move_some(&mut self, log: &RankLog) {
        let (stream, view) = (self.stream, self.view);
        let each = |line: &[u8]| {
            log.append(line);
            if let View::Prefixed(rank) = view {
                let prefix = format!("[{rank}] ");
                show(stream, &[prefix.as_bytes(), line, b"\n"].concat());
            }
        };
        let Some(from) = &mut self.from else { return };
        match from.read(&mut self.buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => {
                self.lines.finish(each);
                self.from = None;
            }
            Ok(length) => {
                let bytes = &self.buffer[..length];
                if let View::Raw = view {
                    show(stream, bytes);
                }
                self.lines.push(bytes, each);
            }
        }
    }
}

/// Writes to the terminal in one piece. Who closed it does not want to see more; that is no error.
fn show(stream: Stream, bytes: &[u8]) {
    let _ = match stream {
        Stream::Out => {
            let mut out = io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        Stream::Err => io::stderr().lock().write_all(bytes),
    };
}

/// A word of the launcher itself, on standard error.
pub(crate) fn say(message: &str) {
    show(Stream::Err, format!("lockstep: {message}\n").as_bytes());
}
