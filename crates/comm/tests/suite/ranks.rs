//! Ranks as processes that a test starts and watches by itself, for tests in which some of them die:
//! no launcher ends the survivors, and each leaves its verdict in a file.

use crate::processes::{Spread, WORLD, free_port};
use lockstep_comm::{
    Cause, Error, Identity, Launcher, LinkCosts, Options, TokenSource, World, token,
};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

const FOLDER: &str = "LOCKSTEP_TEST_FOLDER";
/// The identity of a rank, as JSON.
const IDENTITY: &str = "LOCKSTEP_TEST_IDENTITY";

/// One rank's seat: everything it needs to join, as often as it likes.
pub struct Seat {
    pub identity: Identity,
    pub options: Options,
    pub folder: PathBuf,
}

impl Seat {
    pub fn rank(&self) -> usize {
        self.identity.rank
    }

    pub fn join(&self) -> Result<World, Error> {
        World::join(&self.identity, &self.options)
    }

    /// Lets the test know that this rank has come to a certain point.
    pub fn mark(&self, what: &str) {
        let path = self.folder.join(format!("{what}-{}", self.rank()));
        std::fs::write(path, "").expect("the folder of the test is there");
    }
}

/// Short waits, so that failures show quickly, yet long enough for a machine with other work.
pub fn impatient() -> Options {
    Options {
        timeout: Duration::from_secs(4),
        heartbeat: Duration::from_secs(4),
        join_timeout: Duration::from_secs(20),
        link_costs: Some(LinkCosts::default()),
        ..Options::default()
    }
}

/// What a rank said in the end.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Verdict {
    pub guilty: Option<usize>,
    pub cause: Option<Cause>,
    pub error: String,
    /// When it knew, in milliseconds on the wall clock.
    at_ms: u64,
}

pub struct Ranks {
    children: Vec<Child>,
    ends: Vec<Option<ExitStatus>>,
    pub identities: Vec<Identity>,
    pub folder: PathBuf,
}

/// Starts the ranks of a world, each running `rank`; in such a rank, runs it and never comes back.
/// `test` is the path of the calling test, `world` tells several worlds of one test apart.
pub fn spawn(
    test: &str,
    world: &str,
    spread: Spread,
    options: Options,
    rank: impl Fn(&Seat) -> Result<(), Error>,
) -> Option<Ranks> {
    match std::env::var(WORLD) {
        Ok(name) if name == world => run_rank(spread, options, rank),
        Ok(_) => None,
        Err(_) => Some(Ranks::start(test, world, spread)),
    }
}

fn run_rank(spread: Spread, options: Options, rank: impl Fn(&Seat) -> Result<(), Error>) -> ! {
    let identity = own_identity();
    let folder = PathBuf::from(std::env::var(FOLDER).expect("the test set it"));
    let options = Options { local: spread.links, record: Some(folder.clone()), ..options };
    let seat = Seat { identity, options, folder };
    let Err(error) = rank(&seat) else { std::process::exit(0) };
    eprintln!("{error}");
    let verdict = Verdict {
        guilty: error.culprit(),
        cause: error.cause(),
        error: error.to_string(),
        at_ms: wall_ms(),
    };
    let bytes = serde_json::to_vec(&verdict).expect("plain data");
    std::fs::write(seat.folder.join(format!("verdict-{}", seat.rank())), bytes)
        .expect("the folder of the test is there");
    std::process::exit(3);
}

impl Ranks {
    pub fn start(test: &str, world: &str, spread: Spread) -> Ranks {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("lockstep-suite-{}-{number}-{world}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        let identities = identities(spread);
        let children = identities.iter().map(|i| start_one(test, world, i, &folder)).collect();
        let ends = identities.iter().map(|_| None).collect();
        Ranks { children, ends, identities, folder }
    }

    pub fn pid(&self, rank: usize) -> u32 {
        self.children[rank].id()
    }

    /// Waits until these ranks have marked that they came to a point.
    pub fn await_mark(&mut self, what: &str, ranks: impl IntoIterator<Item = usize>) {
        for rank in ranks {
            let path = self.folder.join(format!("{what}-{rank}"));
            self.until(&format!("rank {rank} comes to {what}"), |_| path.exists());
        }
    }

    /// Sends a signal; says when that was.
    pub fn signal(&self, rank: usize, signal: i32) -> SystemTime {
        let now = SystemTime::now();
        // SAFETY: a plain call; the child is ours and not yet waited for, so its number is its own.
        unsafe { libc::kill(self.pid(rank) as i32, signal) };
        now
    }

    /// Waits for a rank to end by itself.
    pub fn end(&mut self, rank: usize) -> ExitStatus {
        self.until(&format!("rank {rank} ends"), |ranks| {
            let end = ranks.children[rank].try_wait().expect("a child can be waited for");
            ranks.ends[rank] = ranks.ends[rank].or(end);
            ranks.ends[rank].is_some()
        });
        self.ends[rank].expect("just seen")
    }

    /// What a rank said, and how long after `since`.
    pub fn verdict(&mut self, rank: usize, since: SystemTime) -> (Verdict, Duration) {
        let end = self.end(rank);
        assert_eq!(end.code(), Some(3), "rank {rank} gave no verdict: {}", self.log(rank));
        let path = self.folder.join(format!("verdict-{rank}"));
        let bytes = std::fs::read(path).expect("written before it ended");
        let verdict: Verdict = serde_json::from_slice(&bytes).expect("as written");
        let after = verdict.at_ms.saturating_sub(wall_ms_of(since));
        (verdict, Duration::from_millis(after))
    }

    /// All ranks end well.
    pub fn end_well(mut self) {
        let ranks = 0..self.children.len();
        let ends: Vec<ExitStatus> = ranks.clone().map(|rank| self.end(rank)).collect();
        let tell = |rank: usize| format!("rank {rank}: {}\n{}", ends[rank], self.log(rank));
        let story: Vec<String> = ranks.map(tell).collect();
        assert!(ends.iter().all(|end| end.success()), "{}", story.join("\n"));
    }

    pub fn log(&self, rank: usize) -> String {
        std::fs::read_to_string(self.folder.join(format!("log-{rank}"))).unwrap_or_default()
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Ranks) -> bool) {
        let limit = Instant::now() + Duration::from_secs(300);
        while !holds(self) {
            assert!(Instant::now() < limit, "waited 300 s until {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Those that have ended are past caring.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The identity that [`start_one`] gave to this process.
pub fn own_identity() -> Identity {
    let text = std::env::var(IDENTITY).expect("the test set it");
    serde_json::from_str(&text).expect("an identity")
}

/// The identities of a new world on this machine, with a secret of its own.
pub fn identities(spread: Spread) -> Vec<Identity> {
    let token = token::random().expect("random bytes");
    let port = free_port();
    let identity = |rank: usize| Identity {
        rank,
        size: spread.nodes * spread.per_node,
        local_rank: rank % spread.per_node,
        local_size: spread.per_node,
        node: rank / spread.per_node,
        master_addr: "127.0.0.1".into(),
        master_port: port,
        token: TokenSource::Env(token.clone()),
        generation: 0,
        bind: None,
        listener_fd: None,
        launcher: Launcher::Explicit,
    };
    (0..spread.nodes * spread.per_node).map(identity).collect()
}

fn start_one(test: &str, world: &str, identity: &Identity, folder: &Path) -> Child {
    let log = std::fs::File::create(folder.join(format!("log-{}", identity.rank)))
        .expect("a log for the rank");
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    // An ignored test that runs was asked for; so its ranks run it, too.
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    let identity = serde_json::to_string(identity).expect("plain data");
    command.env(IDENTITY, identity).env(WORLD, world).env(FOLDER, folder);
    // A backtrace would hide the message in the log.
    command.env("RUST_BACKTRACE", "0");
    command.stdout(log.try_clone().expect("a second handle")).stderr(log);
    command.spawn().expect("this binary can be started")
}

fn wall_ms() -> u64 {
    wall_ms_of(SystemTime::now())
}

fn wall_ms_of(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    since.as_millis() as u64
}
