//! SIGTERM and SIGINT as a request that a training checks between two steps. Does not stop anything itself.

use std::sync::atomic::{AtomicBool, Ordering};

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

extern "C" fn record(_: libc::c_int) {
    REQUESTED.store(true, Ordering::Relaxed);
}
