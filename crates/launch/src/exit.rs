//! How ranks exited, and which exit was the first failure. Pure values; never waits.

use std::fmt;
use std::time::Duration;

/// Exit code of a rank that stopped on request after saving its state; the same command resumes from there. This is
/// EX_TEMPFAIL of sysexits.h.
pub const EXIT_STOPPED: i32 = 75;

/// Exit code of a rank whose error is permanent, such as a configuration error: a restart would fail in the same way.
/// This is EX_CONFIG of sysexits.h.
pub const EXIT_PERMANENT: i32 = 78;

/// Exit code of a rank whose GPU has failed: it fell off the bus or has an uncorrectable error. Other ranks can continue
/// without it. This is EX_IOERR of sysexits.h.
pub const EXIT_DEVICE_LOST: i32 = 74;

/// How a process exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    pub fn is_success(self) -> bool {
        self == Exit::Code(0)
    }

    /// Success, or a stop on request with everything saved.
    pub fn is_graceful(self) -> bool {
        self.is_success() || self == Exit::Code(EXIT_STOPPED)
    }

    /// The exit code that a shell reports.
    pub fn code(self) -> i32 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(EXIT_DEVICE_LOST) => {
                write!(f, "lost its GPU (exit code {EXIT_DEVICE_LOST})")
            }
            Exit::Code(code) => write!(f, "exited with code {code}"),
            Exit::Signal(signal) => write!(f, "was killed by {}", signal_name(*signal)),
        }
    }
}

/// Whether this signal, as the second one, kills the ranks. SIGTERM does not: a batch system and its tools may each
/// send one.
pub(crate) fn kills_when_second(signal: i32) -> bool {
    matches!(signal, libc::SIGINT | libc::SIGQUIT)
}

pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        other => return format!("signal {other}"),
    };
    name.to_string()
}

/// The exit of one rank, as observed by the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankExit {
    pub rank: usize,
    pub exit: Exit,
    /// Time since the generation started.
    pub at: Duration,
    /// The launcher had signalled the ranks before, so this exit is not a failure.
    pub requested: bool,
}

/// A killed process closes its sockets before the launcher can wait for it, so a peer that fails because of it may be
/// observed first. A rank killed by a signal within this time of the first failure is taken as the cause.
const SAME_TIME: Duration = Duration::from_millis(200);

/// The first failure. A rank killed by a signal at about the same time takes precedence, since ranks that fail because
/// of a peer exit with a code. SIGKILL and a lost GPU take precedence at any time: no rank kills itself or loses its GPU
/// because a peer failed.
pub(super) fn first_failure(exits: &[RankExit]) -> Option<RankExit> {
    let failures = || exits.iter().filter(|exit| !exit.requested && !exit.exit.is_graceful());
    let first = failures().min_by_key(|exit| exit.at)?;
    failures()
        .filter(|exit| match exit.exit {
            Exit::Signal(libc::SIGKILL) | Exit::Code(EXIT_DEVICE_LOST) => true,
            Exit::Signal(_) => exit.at <= first.at + SAME_TIME,
            Exit::Code(_) => false,
        })
        .min_by_key(|exit| exit.at)
        .or(Some(first))
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Exit::{Code, Signal};

    #[test]
    fn the_cause_is_the_first_failure() {
        // (rank, exit, milliseconds, requested)
        type Row = (usize, Exit, u64, bool);
        let cases: &[(&[Row], Option<usize>)] = &[
            (&[], None),
            (&[(0, Code(0), 1, false), (1, Code(0), 2, false)], None),
            (&[(0, Code(0), 1, false), (1, Code(3), 2, false)], Some(1)),
            // The earliest counts, in any order of observation.
            (&[(0, Code(1), 9, false), (1, Code(3), 2, false)], Some(1)),
            // A killed rank may be observed slightly late.
            (&[(0, Code(1), 5, false), (1, Signal(11), 6, false)], Some(1)),
            // Much later it is a consequence, except for SIGKILL.
            (&[(0, Code(1), 5, false), (1, Signal(6), 900, false)], Some(0)),
            (&[(0, Code(1), 5, false), (1, Signal(9), 900, false)], Some(1)),
            // A lost GPU is a cause, not a consequence.
            (&[(0, Code(1), 5, false), (1, Code(EXIT_DEVICE_LOST), 900, false)], Some(1)),
            // Requested exits are not failures.
            (&[(0, Signal(15), 1, true), (1, Code(2), 9, false)], Some(1)),
            (&[(0, Signal(15), 1, true), (1, Code(2), 9, true)], None),
            (&[(0, Code(2), 1, false), (1, Signal(9), 9, true)], Some(0)),
            // Graceful exits are not failures, whoever requested them.
            (&[(0, Code(EXIT_STOPPED), 1, false), (1, Code(EXIT_STOPPED), 2, false)], None),
            (&[(0, Code(EXIT_STOPPED), 1, false), (1, Signal(9), 2, false)], Some(1)),
        ];
        for (rows, expected) in cases {
            let exits: Vec<RankExit> = rows
                .iter()
                .map(|&(rank, exit, at, requested)| RankExit {
                    rank,
                    exit,
                    at: Duration::from_millis(at),
                    requested,
                })
                .collect();
            let cause = first_failure(&exits).map(|exit| exit.rank);
            assert_eq!(cause, *expected, "{rows:?}");
        }
    }

    #[test]
    fn exit_codes_match_the_shell() {
        for (exit, code, text) in [
            (Code(7), 7, "exited with code 7"),
            (Code(EXIT_DEVICE_LOST), 74, "lost its GPU (exit code 74)"),
            (Signal(11), 139, "was killed by SIGSEGV"),
            (Signal(64), 192, "was killed by signal 64"),
        ] {
            assert_eq!(exit.code(), code);
            assert_eq!(exit.to_string(), text);
        }
    }
}
