//! A run folder is used by one process at a time.

use crate::support::fresh;
use lockstep_ckpt::{Error, RunLock};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Long enough on any machine; nothing waits for it.
const NEVER: Duration = Duration::from_secs(600);

#[test]
fn a_second_process_is_refused_while_a_run_is_in_use() {
    let run = fresh("in-use");
    let lock = RunLock::take(&run).unwrap();
    let error = RunLock::take(&run).unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let holder = format!("in use by process {} on host {}", std::process::id(), host.trim());
    assert!(error.to_string().contains(&holder), "{error}");
    drop(lock);
    assert_eq!(fs::read_dir(&run).unwrap().count(), 0, "the lock is removed");
    drop(RunLock::take(&run).unwrap());
}

/// Writes a record as a process that was killed would leave it.
fn leave_record(run: &Path, boot: &str, beat: u64) {
    fs::create_dir_all(run).unwrap();
    let record = serde_json::json!(
        {"host": "elsewhere", "pid": 7, "started": 0, "boot": boot, "beat": beat}
    );
    // Like a holder, which overwrites its record.
    let path = run.join("lock");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    file.write_all(record.to_string().as_bytes()).unwrap();
}

#[test]
fn the_lock_of_a_dead_process_of_this_host_is_taken_at_once() {
    let run = fresh("dead-here");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    leave_record(&run, boot.trim(), 5);
    RunLock::take_after(&run, NEVER).unwrap();
    // A process that was killed before it wrote its record.
    fs::write(run.join("lock"), "").unwrap();
    RunLock::take_after(&run, NEVER).unwrap();
}

/// On a file system whose locks are local to a host, only the heartbeat shows that the holder is alive.
#[test]
fn a_holder_on_another_host_is_recognized_by_its_heartbeat() {
    let run = fresh("elsewhere");
    leave_record(&run, "another", 100);
    let stop = AtomicBool::new(false);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            for beat in (100..1000).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                leave_record(&run, "another", beat);
            }
        });
        let taken = RunLock::take_after(&run, NEVER);
        stop.store(true, Ordering::Relaxed);
        taken.unwrap_err()
    });
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    // Without a heartbeat it is gone.
    leave_record(&run, "another", 100);
    RunLock::take_after(&run, Duration::from_millis(20)).unwrap();
}

#[test]
fn a_lock_that_was_taken_over_is_not_removed_by_its_old_holder() {
    let run = fresh("taken-over");
    let old = RunLock::take(&run).unwrap();
    // A user removes the lock of a process that hangs.
    fs::remove_file(run.join("lock")).unwrap();
    let _new = RunLock::take(&run).unwrap();
    drop(old);
    assert!(matches!(RunLock::take(&run), Err(Error::InUse { .. })));
}
