//! Binds threads to cores.

use std::io;

/// Binds this thread, and threads that it starts from now on, to `cores`.
pub fn bind_to(cores: &[usize]) -> io::Result<()> {
    // SAFETY: the set is plain data; the kernel reads it only during the call.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for core in cores.iter().filter(|core| **core < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(*core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The cores that this thread may use.
pub fn allowed_cores() -> Vec<usize> {
    // SAFETY: as above; the kernel writes only to the set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &set)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_to_one_of_its_cores() {
        std::thread::spawn(|| {
            let core = allowed_cores()[0];
            bind_to(&[core]).unwrap();
            assert_eq!(allowed_cores(), [core]);
            assert_eq!(std::thread::spawn(allowed_cores).join().unwrap(), [core]);
            // No core at all is refused, and nothing changes.
            assert!(bind_to(&[]).is_err());
            assert_eq!(allowed_cores(), [core]);
        })
        .join()
        .unwrap();
    }
}
