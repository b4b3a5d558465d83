//! Forwards the output of ranks to log files, to the last lines kept for failure reports, and to the terminal. Never
//! loses or mixes lines, and never fails a rank because the terminal was closed.

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

/// The ranks whose output is shown on the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputMode {
    /// Rank 0, unbuffered, so that progress bars work.
    RankZero,
    /// All ranks, in whole lines with the rank as prefix: `[3] line`.
    All,
    None,
}

const TAIL_LINES: usize = 20;

/// Log of one rank in one generation.
pub(super) struct RankLog {
    pub path: PathBuf,
    inner: Mutex<Inner>,
}

struct Inner {
    file: File,
    tail: VecDeque<String>,
    /// A write error was already reported.
    failed: bool,
}

impl RankLog {
    /// Opens `DIR/rank-3.log` for appending and writes a header line with the generation.
    pub fn open(dir: &Path, rank: usize, generation: u32) -> io::Result<RankLog> {
        fs::create_dir_all(dir)?;
        let path = dir.join(format!("rank-{rank}.log"));
        let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
        writeln!(file, "--- generation {generation} ---")?;
        let inner = Inner { file, tail: VecDeque::with_capacity(TAIL_LINES), failed: false };
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
        // A full disk gives one warning and does not stop the training.
        if let Err(error) = inner.file.write_all(&[line, b"\n"].concat())
            && !inner.failed
        {
            inner.failed = true;
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

/// How the lines of one rank appear on the terminal.
#[derive(Clone, Copy)]
pub(super) enum LineFormat {
    Raw,
    Prefixed(usize),
    Hidden,
}

impl LineFormat {
    pub fn new(mode: OutputMode, rank: usize) -> LineFormat {
        match mode {
            OutputMode::All => LineFormat::Prefixed(rank),
            OutputMode::RankZero if rank == 0 => LineFormat::Raw,
            OutputMode::RankZero | OutputMode::None => LineFormat::Hidden,
        }
    }
}

/// Forwards a rank's output on a separate thread until both streams end; then drops `done`.
pub(super) fn forward(
    out: ChildStdout,
    err: ChildStderr,
    format: LineFormat,
    log: Arc<RankLog>,
    done: Sender<()>,
) -> io::Result<()> {
    let forward_all = move || {
        let _done = done;
        let mut out = Forwarder::new(out, Stream::Out, format);
        let mut err = Forwarder::new(err, Stream::Err, format);
        while out.fd().is_some() || err.fd().is_some() {
            // Standard error is polled first and read last, so that output printed before an error is shown before it.
            let Ok([err_ready, out_ready]) = sys::wait_readable([err.fd(), out.fd()]) else {
                break;
            };
            if out_ready {
                out.forward_some(&log);
            }
            if err_ready {
                err.forward_some(&log);
            }
        }
    };
    thread::Builder::new().name("rank-output".into()).spawn(forward_all)?;
    Ok(())
}

/// Forwards one stream.
struct Forwarder<From> {
    /// `None` once it has ended.
    from: Option<From>,
    stream: Stream,
    format: LineFormat,
    lines: Lines,
    /// As large as a pipe's buffer, so that one read empties it.
    buffer: Vec<u8>,
}

impl<From: Read + AsRawFd> Forwarder<From> {
    fn new(from: From, stream: Stream, format: LineFormat) -> Self {
        Forwarder {
            from: Some(from),
            stream,
            format,
            lines: Lines::default(),
            buffer: vec![0; 64 * 1024],
        }
    }

    fn fd(&self) -> Option<RawFd> {
        self.from.as_ref().map(AsRawFd::as_raw_fd)
    }

    fn forward_some(&mut self, log: &RankLog) {
        let (stream, format) = (self.stream, self.format);
        let each = |line: &[u8]| {
            log.append(line);
            if let LineFormat::Prefixed(rank) = format {
                let prefix = format!("[{rank}] ");
                write(stream, &[prefix.as_bytes(), line, b"\n"].concat());
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
                if let LineFormat::Raw = format {
                    write(stream, bytes);
                }
                self.lines.push(bytes, each);
            }
        }
    }
}

/// Writes to the terminal in one piece. A closed terminal is not an error.
fn write(stream: Stream, bytes: &[u8]) {
    let _ = match stream {
        Stream::Out => {
            let mut out = io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        Stream::Err => io::stderr().lock().write_all(bytes),
    };
}

/// Prints a message of the launcher itself on standard error.
pub(crate) fn report(message: &str) {
    write(Stream::Err, format!("lockstep: {message}\n").as_bytes());
}
