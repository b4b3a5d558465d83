//! How processes ended, and which of them is to blame. Pure values; never waits for anything.

use std::fmt;
use std::time::Duration;

/// The exit code of a rank that was asked to stop and did so in good order: what it had is saved, and the same
/// command goes on from there. The number is that of a temporary failure in sysexits.h, after which one tries again.
pub const STOPPED: i32 = 75;

/// The exit code of a rank whose error another try would only repeat: a mistake in what it was told.
pub const HOPELESS: i32 = 78;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Code(i32),
    Signal(i32),
}

impl Ending {
    pub fn is_success(self) -> bool {
        self == Ending::Code(0)
    }

    /// At its own time, or because it was asked to and had saved what it had.
    pub fn is_orderly(self) -> bool {
        self.is_success() || self == Ending::Code(STOPPED)
    }

    /// The exit code by which a shell would report it.
    pub fn exit_code(self) -> i32 {
        match self {
            Ending::Code(code) => code,
            Ending::Signal(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Code(code) => write!(f, "exited with code {code}"),
            Ending::Signal(signal) => write!(f, "was killed by {}", signal_name(*signal)),
        }
    }
}

pub fn signal_name(signal: i32) -> String {
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

/// One rank's end, as the launcher noticed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exit {
    pub rank: usize,
    pub ending: Ending,
    /// Since the generation began.
    pub at: Duration,
    /// Whether the launcher had signalled the ranks by then; such an end is its own doing.
    pub asked: bool,
}

/// A process that is killed closes its sockets a little before it can be waited for, so a quick
/// peer may be noticed first. Ends this close together count as one moment.
const ONE_MOMENT: Duration = Duration::from_millis(200);

/// The failure that came first; of those in its moment rather one by a signal, since a rank that
/// fails over its peer's death exits by itself.
pub(super) fn first_failure(exits: &[Exit]) -> Option<Exit> {
    let failures = || exits.iter().filter(|exit| !exit.asked && !exit.ending.is_orderly());
    let first = failures().min_by_key(|exit| exit.at)?;
    failures()
        .filter(|exit| matches!(exit.ending, Ending::Signal(_)))
        .filter(|exit| exit.at <= first.at + ONE_MOMENT)
        .min_by_key(|exit| exit.at)
        .or(Some(first))
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Ending::{Code, Signal};

    #[test]
    fn blame() {
        // (rank, ending, milliseconds, asked)
        type Row = (usize, Ending, u64, bool);
        let cases: &[(&[Row], Option<usize>)] = &[
            (&[], None),
            (&[(0, Code(0), 1, false), (1, Code(0), 2, false)], None),
            (&[(0, Code(0), 1, false), (1, Code(3), 2, false)], Some(1)),
            // The first wins, in whatever order they are told.
            (&[(0, Code(1), 9, false), (1, Code(3), 2, false)], Some(1)),
            // The killed one was noticed a moment late.
            (&[(0, Code(1), 5, false), (1, Signal(9), 6, false)], Some(1)),
            // Much later it is a consequence.
            (&[(0, Code(1), 5, false), (1, Signal(6), 900, false)], Some(0)),
            // Who ended at our word is not to blame.
            (&[(0, Signal(15), 1, true), (1, Code(2), 9, false)], Some(1)),
            (&[(0, Signal(15), 1, true), (1, Code(2), 9, true)], None),
            // Who stopped in good order has not failed, whoever asked it to.
            (&[(0, Code(STOPPED), 1, false), (1, Code(STOPPED), 2, false)], None),
            (&[(0, Code(STOPPED), 1, false), (1, Signal(9), 2, false)], Some(1)),
        ];
        for (rows, expected) in cases {
            let exits: Vec<Exit> = rows
                .iter()
                .map(|&(rank, ending, at, asked)| Exit {
                    rank,
                    ending,
                    at: Duration::from_millis(at),
                    asked,
                })
                .collect();
            let blamed = first_failure(&exits).map(|exit| exit.rank);
            assert_eq!(blamed, *expected, "{rows:?}");
        }
    }

    #[test]
    fn exit_codes_are_a_shells() {
        for (ending, code, text) in [
            (Code(7), 7, "exited with code 7"),
            (Signal(11), 139, "was killed by SIGSEGV"),
            (Signal(64), 192, "was killed by signal 64"),
        ] {
            assert_eq!(ending.exit_code(), code);
            assert_eq!(ending.to_string(), text);
        }
    }
}
