//! SIGTERM and SIGINT as a request that a training checks between two steps, and SIGUSR1 as a request for a timeline.
//! Does not stop anything itself.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use lockstep_events::trace::{TRACE_DIR, TRACE_REQUEST};

/// Set by the signal handler, which may only write atomics.
static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Records SIGTERM and SIGINT instead of terminating this process. A second SIGINT (Ctrl-C twice) terminates it; a
/// second SIGTERM does not, since a launcher and a batch system may each send one.
pub fn install_handlers() {
    for (signal, flags) in [(libc::SIGTERM, 0), (libc::SIGINT, libc::SA_RESETHAND)] {
        // SAFETY: the action is fully initialized (zeros are an empty mask), and the handler only writes an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = record as extern "C" fn(libc::c_int) as libc::sighandler_t;
            action.sa_flags = flags | libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Whether a signal asked this process to stop.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Path of the file that asks for a timeline.
static TRACE_PATH: OnceLock<CString> = OnceLock::new();

/// From now on, SIGUSR1 asks the run in `folder` for a timeline of its next steps.
pub fn trace_on_signal(folder: &Path) {
    let trace = folder.join(TRACE_DIR);
    let path = CString::new(trace.join(TRACE_REQUEST).as_os_str().as_bytes());
    // A run whose folder cannot be written has other problems, and reports them.
    let (Ok(path), Ok(())) = (path, std::fs::create_dir_all(&trace)) else { return };
    let _ = TRACE_PATH.set(path);
    // SAFETY: the action is fully initialized (zeros are an empty mask), and the handler only makes calls that are
    // allowed in one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = request_trace as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
}

/// Creates the request file.
extern "C" fn request_trace(_: libc::c_int) {
    let Some(path) = TRACE_PATH.get() else { return };
    // SAFETY: the path ends with NUL and lives forever; open and close may be called in a signal handler, and errno is
    // restored for the interrupted code.
    unsafe {
        let errno = *libc::__errno_location();
        let file =
            libc::open(path.as_ptr(), libc::O_CREAT | libc::O_WRONLY | libc::O_CLOEXEC, 0o644);
        if file >= 0 {
            libc::close(file);
        }
        *libc::__errno_location() = errno;
    }
}

extern "C" fn record(_: libc::c_int) {
    REQUESTED.store(true, Ordering::Relaxed);
}
