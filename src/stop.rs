//! SIGTERM and SIGINT as a wish that a training looks at between two steps. Ends nothing itself.

use std::sync::atomic::{AtomicBool, Ordering};

/// The one thing that a handler of signals may write to.
static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on SIGTERM and SIGINT are noted instead of ending this process. A second SIGINT ends it at once, as who
/// types it twice expects; a second SIGTERM does not, for launchers and batch systems may each send one.
pub fn listen() {
    for (signal, flags) in [(libc::SIGTERM, 0), (libc::SIGINT, libc::SA_RESETHAND)] {
        // SAFETY: the action is whole (zeros are an empty mask), and the handler only writes an atomic.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as extern "C" fn(libc::c_int) as libc::sighandler_t;
            action.sa_flags = flags | libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Whether somebody wants this process to stop.
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

extern "C" fn note(_: libc::c_int) {
    ASKED.store(true, Ordering::Relaxed);
}
