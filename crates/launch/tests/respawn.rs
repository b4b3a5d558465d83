//! A program that starts itself as ranks: the copies of this test's binary run the same test and find that they are
//! ranks.

use std::fs;
use std::net::TcpListener;
use std::os::fd::FromRawFd;
use std::path::Path;

use lockstep_comm::{Identity, Launcher};
use lockstep_launch::{identity, launch, this_program};

const DIR: &str = "RESPAWN_TEST_DIR";

#[test]
fn a_program_starts_itself_as_ranks() {
    let identity = identity::from_process_env().expect("no identity or a valid one");
    match std::env::var(DIR) {
        Ok(dir) => run_rank(&identity, Path::new(&dir)),
        Err(_) => start_ranks(),
    }
}

fn start_ranks() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("respawn");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target directory is writable");
    let mut spec = this_program(3, &dir.join("logs")).expect("this program has a path");
    spec.extra_env = vec![(DIR.to_string(), dir.display().to_string())];
    let outcome = launch(&spec).expect("ranks start");
    assert_eq!(outcome.exit_code, 0, "{outcome:?}");
    for rank in 0..3 {
        let seen = fs::read_to_string(dir.join(rank.to_string())).expect("the rank wrote it");
        assert_eq!(seen, format!("{rank} of 3"));
        assert!(dir.join(format!("logs/rank-{rank}.log")).exists());
    }
}

fn run_rank(identity: &Identity, dir: &Path) {
    assert_eq!(identity.launcher, Launcher::Explicit);
    assert_eq!(identity.listener_fd.is_some(), identity.rank == 0);
    if let Some(fd) = identity.listener_fd {
        // SAFETY: rank 0 inherits the descriptor from its launcher and owns it.
        let listener = unsafe { TcpListener::from_raw_fd(fd) };
        let port = listener.local_addr().expect("it is bound").port();
        assert_eq!(port, identity.master_port);
    }
    let seen = format!("{} of {}", identity.rank, identity.size);
    fs::write(dir.join(identity.rank.to_string()), seen).expect("the test's directory is writable");
}
