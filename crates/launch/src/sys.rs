//! Safe wrappers for the system calls that need `unsafe`: signals, parent-death signal, inherited sockets. Makes no
//! decisions.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::exit::Exit;

/// The signals that ask a launcher to stop.
const STOP_SIGNALS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Configures `command` to start a rank: it leads its own process group, dies with the calling *thread*, has no blocked
/// signals, and inherits `listener` if one is given.
pub(super) fn prepare_rank(command: &mut Command, listener: Option<RawFd>) {
    command.process_group(0);
    let launcher = std::process::id();
    let prepare = move || {
        // SAFETY: prctl, getppid, sigemptyset, sigprocmask and fcntl are async-signal-safe, so they are allowed between
        // fork and exec; the mask is a valid local; the listener is open in the child because the launcher keeps it
        // until spawn returns.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // If the launcher died before the call above, the signal is never delivered.
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
    // SAFETY: the closure only makes system calls; it does not allocate or lock.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Waits until the child has exited and leaves it a zombie. Its pid and process group id stay reserved until it is
/// reaped, so a late signal cannot hit an unrelated process.
pub(super) fn wait_without_reaping(pid: u32) -> io::Result<Exit> {
    loop {
        // SAFETY: siginfo_t is plain data for which zeros are valid, and waitid only writes to it.
        let (result, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOWAIT;
            (libc::waitid(libc::P_PID, pid, &mut info, options), info)
        };
        match check(result) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        // SAFETY: waitid succeeded for an exited child, so the SIGCHLD fields are filled in.
        let status = unsafe { info.si_status() };
        return Ok(match info.si_code {
            libc::CLD_EXITED => Exit::Code(status),
            _ => Exit::Signal(status),
        });
    }
}

/// A descriptor that becomes readable when the child exits.
pub(super) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call accesses no memory, and a non-negative result is a new descriptor that nothing else owns.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        check(fd as libc::c_int).map(|fd| OwnedFd::from_raw_fd(fd))
    }
}

/// A queue of descriptors that became readable, in the order in which they did.
pub(super) struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: a non-negative result is a new descriptor that nothing else owns.
        unsafe {
            check(libc::epoll_create1(libc::EPOLL_CLOEXEC))
                .map(|fd| Epoll(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// Reports `data` once, when `fd` becomes readable.
    pub fn add_once(&self, fd: &OwnedFd, data: u64) -> io::Result<()> {
        let events = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;
        let mut event = libc::epoll_event { events, u64: data };
        // SAFETY: the event is a valid local, and both descriptors are open.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event)
        })
        .map(drop)
    }

    /// Waits until at least one descriptor is readable.
    pub fn wait(&self) -> io::Result<Vec<u64>> {
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; 64];
        loop {
            // SAFETY: the kernel writes at most as many events as the array has.
            let count = check(unsafe {
                let (events, len) = (ready.as_mut_ptr(), ready.len() as libc::c_int);
                libc::epoll_wait(self.0.as_raw_fd(), events, len, -1)
            });
            match count {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
                Ok(count) => {
                    return Ok(ready[..count as usize].iter().map(|event| event.u64).collect());
                }
            }
        }
    }
}

/// Number of processes of this host that the kernel has killed because memory ran out.
pub(super) fn oom_kills() -> Option<u64> {
    let counters = std::fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

/// Sends a signal to a process group.
pub(super) fn signal_group(leader: u32, signal: i32) {
    // SAFETY: kill accesses no memory. A group that is already gone is not an error.
    unsafe {
        libc::kill(-(leader as libc::pid_t), signal);
    }
}

/// Blocks the stop signals in the calling thread (and threads that it starts) until dropped, so that they can be read
/// from a descriptor instead.
pub(super) struct BlockedSignals {
    previous: libc::sigset_t,
    pending: File,
}

impl BlockedSignals {
    pub fn block() -> io::Result<BlockedSignals> {
        // SAFETY: all sets are valid locals; signalfd returns a new descriptor.
        unsafe {
            let mut blocked: libc::sigset_t = std::mem::zeroed();
            let mut previous: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut blocked);
            for signal in STOP_SIGNALS {
                if !is_ignored(signal) {
                    libc::sigaddset(&mut blocked, signal);
                }
            }
            let fd = check(libc::signalfd(-1, &blocked, libc::SFD_CLOEXEC))?;
            let pending = File::from(OwnedFd::from_raw_fd(fd));
            match libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, &mut previous) {
                0 => Ok(BlockedSignals { previous, pending }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// A second handle to read from, for another thread.
    pub fn reader(&self) -> io::Result<File> {
        self.pending.try_clone()
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: `previous` was filled in by pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.previous, std::ptr::null_mut());
        }
    }
}

/// Whether the signal is ignored, as under nohup or a shell's `&`. A blocked signal would be delivered to the
/// descriptor nevertheless.
fn is_ignored(signal: i32) -> bool {
    // SAFETY: sigaction with a null new action only reads, into a valid local.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now) == 0
            && now.sa_sigaction == libc::SIG_IGN
    }
}

/// Waits until at least one descriptor is readable or closed, and returns which ones are. They are polled in order;
/// `None` is skipped.
pub(super) fn wait_readable<const N: usize>(fds: [Option<RawFd>; N]) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| libc::pollfd {
        // The kernel skips negative descriptors.
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

/// Reads the next pending signal from a [`BlockedSignals::reader`].
pub(super) fn read_signal(pending: &mut File) -> io::Result<i32> {
    // A signalfd_siginfo starts with the signal number.
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    pending.read_exact(&mut info)?;
    let [a, b, c, d, ..] = info;
    Ok(i32::from_ne_bytes([a, b, c, d]))
}
