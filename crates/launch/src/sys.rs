//! The few calls to the kernel that need `unsafe`: signals, parent death, inherited sockets. Decides
//! nothing; each function is one act, safe to call.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::ending::Ending;

/// The signals that ask a launcher to end.
const ASKING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Makes the process that `command` starts a rank: it leads its own process group, dies with the
/// calling *thread*, has no signal blocked, and inherits `listener` if one is given.
pub(super) fn make_rank(command: &mut Command, listener: Option<RawFd>) {
    command.process_group(0);
    let launcher = std::process::id();
    let prepare = move || {
        // SAFETY: prctl, getppid, sigemptyset, sigprocmask and fcntl are plain system calls (or pure
        // writes to a local), allowed between fork and exec; the mask is a valid local; and the
        // listener's number is open in the child because the launcher keeps it until spawn returns.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // The launcher may have died before the line above; nobody would tell us any more.
            if libc::getppid() as u32 != launcher {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            check(libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()))?;
            if let Some(fd) = listener {
                check(libc::fcntl(fd, libc::F_SETFD, 0))?;
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only; it neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Waits until the child ended, and leaves it a zombie: its number, and that of its group, stay
/// taken until it is reaped, so a late signal cannot hit a stranger.
pub(super) fn wait_without_reaping(pid: u32) -> io::Result<Ending> {
    loop {
        // SAFETY: siginfo_t is plain data, for which zeros are valid, and is ours to be written.
        let (result, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOWAIT;
            (libc::waitid(libc::P_PID, pid, &mut info, how), info)
        };
        match check(result) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        // SAFETY: waitid succeeded for an ended child, so the fields of SIGCHLD are filled in.
        let status = unsafe { info.si_status() };
        return Ok(match info.si_code {
            libc::CLD_EXITED => Ending::Code(status),
            _ => Ending::Signal(status),
        });
    }
}

/// Sends a signal to a rank and all its descendants that stayed in its group.
pub(super) fn signal_group(leader: u32, signal: i32) {
    // SAFETY: kill takes no memory. That the group is gone already is no failure.
    unsafe {
        libc::kill(-(leader as libc::pid_t), signal);
    }
}

/// The signals that ask us to end, held back from the calling thread (and threads it starts from
/// now on) until dropped, to be read instead.
pub(super) struct HeldSignals {
    before: libc::sigset_t,
    arrived: File,
}

impl HeldSignals {
    pub fn hold() -> io::Result<HeldSignals> {
        // SAFETY: all sets are valid locals; signalfd returns a descriptor that nobody else owns.
        unsafe {
            let mut held: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut held);
            for signal in ASKING {
                if !is_ignored(signal) {
                    libc::sigaddset(&mut held, signal);
                }
            }
            let fd = check(libc::signalfd(-1, &held, libc::SFD_CLOEXEC))?;
            let arrived = File::from(OwnedFd::from_raw_fd(fd));
            match libc::pthread_sigmask(libc::SIG_BLOCK, &held, &mut before) {
                0 => Ok(HeldSignals { before, arrived }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// A second handle to read from, for another thread.
    pub fn reader(&self) -> io::Result<File> {
        self.arrived.try_clone()
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // SAFETY: `before` was filled in by pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }
}

/// Whether somebody (nohup, a shell's `&`) had us ignore the signal. A held signal would arrive
/// all the same.
fn is_ignored(signal: i32) -> bool {
    // SAFETY: sigaction with a null new action only reads, into a valid local.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now) == 0
            && now.sa_sigaction == libc::SIG_IGN
    }
}

/// Waits until one of the descriptors can be read or has ended, and says which. They are looked at
/// in order; none stands for one that is not waited for.
pub(super) fn wait_readable<const N: usize>(fds: [Option<RawFd>; N]) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| libc::pollfd {
        // The kernel skips negative numbers.
        fd: fd.unwrap_or(-1),
        events: libc::POLLIN,
        revents: 0,
    });
    loop {
        // SAFETY: the array is valid for its length during the call.
        match check(unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, -1) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
            Ok(_) => return Ok(polled.map(|one| one.revents != 0)),
        }
    }
}

/// The number of the next signal that [`HeldSignals`] held back.
pub(super) fn read_signal(arrived: &mut File) -> io::Result<i32> {
    // A signalfd_siginfo begins with the signal's number.
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    arrived.read_exact(&mut info)?;
    let [a, b, c, d, ..] = info;
    Ok(i32::from_ne_bytes([a, b, c, d]))
}
