//! Runs `lockstep launch` in a test, in an empty directory, and collects the result.
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A launcher that will run a command on every rank, in its own directory.
pub struct Launch {
    pub dir: PathBuf,
    pub command: Command,
}

/// Launches a shell script in the empty directory `name`.
pub fn launch(name: &str, options: &str, script: &str) -> Launch {
    launch_program(name, options, &["sh", "-c", script])
}

pub fn launch_program(name: &str, options: &str, program: &[&str]) -> Launch {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target directory is writable");
    launch_in(&dir, options, program)
}

pub fn launch_in(dir: &Path, options: &str, program: &[&str]) -> Launch {
    let mut command = crate::program::lockstep();
    for (name, _) in std::env::vars_os() {
        let ours = |name: &str| name.starts_with("PET_") || name.starts_with("LOCKSTEP_");
        if name.to_str().is_some_and(ours) {
            command.env_remove(name);
        }
    }
    command.arg("launch").args(options.split_whitespace());
    command.arg("--").args(program).current_dir(dir);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    crate::signals::restore(&mut command);
    Launch { dir: dir.to_path_buf(), command }
}

impl Launch {
    pub fn env(mut self, name: &str, value: &str) -> Launch {
        self.command.env(name, value);
        self
    }

    pub fn run(mut self) -> LaunchResult {
        let output = self.command.output().expect("lockstep starts");
        LaunchResult::new(self.dir, output)
    }

    pub fn start(mut self) -> (PathBuf, Child) {
        let child = self.command.spawn().expect("lockstep starts");
        (self.dir, child)
    }
}

pub struct LaunchResult {
    pub dir: PathBuf,
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl LaunchResult {
    pub fn new(dir: PathBuf, output: Output) -> LaunchResult {
        LaunchResult {
            dir,
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub fn file(&self, name: &str) -> String {
        read(&self.dir.join(name))
    }

    #[track_caller]
    pub fn assert_prints(&self, part: &str) {
        assert!(self.err.contains(part), "no {part:?} in:\n{}", self.err);
    }

    #[track_caller]
    pub fn assert_exits(&self, code: i32) {
        assert_eq!(self.code, Some(code), "{}", self.err);
    }
}

pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Waits for a condition. The limit only keeps a broken test from hanging.
#[track_caller]
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(600);
    while !check() {
        assert!(Instant::now() < limit, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The process ids that scripts wrote to `pid-*`, once there are `count`.
#[track_caller]
pub fn pids(dir: &Path, count: usize) -> Vec<u32> {
    let find = || -> Vec<u32> {
        let entries = fs::read_dir(dir).expect("the test's directory").flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("pid-"))
            .filter_map(|entry| read(&entry.path()).trim().parse().ok())
            .collect()
    };
    eventually("all ranks write their pids", || find().len() == count);
    find()
}

/// Waits until the processes have exited. Zombies count as exited.
#[track_caller]
pub fn wait_until_gone(pids: &[u32]) {
    let runs = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let state = status.lines().find_map(|line| line.strip_prefix("State:"));
        state.is_some_and(|state| !state.trim_start().starts_with(['Z', 'X']))
    };
    eventually(&format!("processes {pids:?} exit"), || !pids.iter().any(runs));
}

pub fn signal(pid: u32, number: i32) {
    // SAFETY: the call takes no pointers.
    assert_eq!(unsafe { libc::kill(pid as i32, number) }, 0, "signalling {pid}");
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its number").port()
}
