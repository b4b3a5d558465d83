//! Signal dispositions of programs that tests start.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Resets signals that the test runner ignores, as under nohup: the launcher does not handle ignored signals.
pub fn restore(command: &mut Command) {
    let reset = || {
        for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
            // SAFETY: signal is async-signal-safe, and no other thread exists between fork and exec.
            unsafe { libc::signal(number, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: the closure only calls async-signal-safe functions.
    unsafe { command.pre_exec(reset) };
}
