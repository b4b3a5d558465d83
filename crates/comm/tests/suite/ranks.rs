//! Ranks as processes that a test starts itself, for tests in which some of them die: no launcher ends the
//! survivors, and each writes its error to a file.

use crate::processes::{Topology, WORLD, free_port};
use lockstep_comm::{
    Cause, Error, Identity, Launcher, LinkCosts, Options, TokenSource, Transport, World, token,
};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const FOLDER: &str = "LOCKSTEP_TEST_FOLDER";
/// The identity of a rank, as JSON.
const IDENTITY: &str = "LOCKSTEP_TEST_IDENTITY";

/// One rank of a test: everything it needs to join worlds.
pub struct TestRank {
    pub identity: Identity,
    pub options: Options,
    pub folder: PathBuf,
}

impl TestRank {
    pub fn rank(&self) -> usize {
        self.identity.rank
    }

    pub fn join(&self) -> Result<World, Error> {
        World::join(&self.identity, &self.options)
    }

    /// Tells the test that this rank has reached a point.
    pub fn mark(&self, what: &str) {
        let path = self.folder.join(format!("{what}-{}", self.rank()));
        std::fs::write(path, "").expect("the folder of the test exists");
    }
}

/// Timeouts that a loaded machine does not reach. Tests that wait for a timeout set a shorter one.
pub fn options() -> Options {
    Options {
        timeout: Duration::from_secs(12),
        heartbeat: Duration::from_secs(30),
        join_timeout: Duration::from_secs(120),
        link_costs: Some(LinkCosts::default()),
        ..Options::default()
    }
}

/// The error with which a rank ended.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct RankError {
    pub culprit: Option<usize>,
    pub cause: Option<Cause>,
    pub text: String,
}

pub struct Ranks {
    children: Vec<Child>,
    exits: Vec<Option<ExitStatus>>,
    pub identities: Vec<Identity>,
    pub folder: PathBuf,
}

/// Starts the ranks of a world, each running `rank`; inside such a rank, runs it and does not return.
/// `test` is the path of the calling test; `world` distinguishes several worlds of one test.
pub fn spawn(
    test: &str,
    world: &str,
    topology: Topology,
    options: Options,
    rank: impl Fn(&TestRank) -> Result<(), Error>,
) -> Option<Ranks> {
    match std::env::var(WORLD) {
        Ok(name) if name == world => run_rank(topology, options, rank),
        Ok(_) => None,
        Err(_) => Some(Ranks::start(test, world, topology)),
    }
}

fn run_rank(
    topology: Topology,
    options: Options,
    rank: impl Fn(&TestRank) -> Result<(), Error>,
) -> ! {
    let identity = own_identity();
    let folder = PathBuf::from(std::env::var(FOLDER).expect("the test set it"));
    let options = Options { local: topology.links, record: Some(folder.clone()), ..options };
    let test_rank = TestRank { identity, options, folder };
    let Err(error) = rank(&test_rank) else { std::process::exit(0) };
    eprintln!("{error}");
    let error =
        RankError { culprit: error.culprit(), cause: error.cause(), text: error.to_string() };
    let bytes = serde_json::to_vec(&error).expect("plain data");
    std::fs::write(test_rank.folder.join(format!("error-{}", test_rank.rank())), bytes)
        .expect("the folder of the test exists");
    std::process::exit(3);
}

impl Ranks {
    pub fn start(test: &str, world: &str, topology: Topology) -> Ranks {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("lockstep-suite-{}-{number}-{world}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        let identities = identities(topology);
        let children = identities.iter().map(|i| start_one(test, world, i, &folder)).collect();
        let exits = identities.iter().map(|_| None).collect();
        Ranks { children, exits, identities, folder }
    }

    pub fn pid(&self, rank: usize) -> u32 {
        self.children[rank].id()
    }

    /// Waits until these ranks have reached a point.
    pub fn wait_for_mark(&mut self, what: &str, ranks: impl IntoIterator<Item = usize>) {
        for rank in ranks {
            let path = self.folder.join(format!("{what}-{rank}"));
            self.until(&format!("rank {rank} reaches {what}"), |_| path.exists());
        }
    }

    pub fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the child has not been waited for, so its process id is valid.
        unsafe { libc::kill(self.pid(rank) as i32, signal) };
    }

    /// Waits until a rank has ended.
    pub fn wait(&mut self, rank: usize) -> ExitStatus {
        self.until(&format!("rank {rank} ends"), |ranks| {
            let exit = ranks.children[rank].try_wait().expect("a child can be waited for");
            ranks.exits[rank] = ranks.exits[rank].or(exit);
            ranks.exits[rank].is_some()
        });
        self.exits[rank].expect("just set")
    }

    /// The error with which a rank ends.
    pub fn error(&mut self, rank: usize) -> RankError {
        let exit = self.wait(rank);
        assert_eq!(exit.code(), Some(3), "rank {rank} reported no error: {}", self.log(rank));
        let path = self.folder.join(format!("error-{rank}"));
        let bytes = std::fs::read(path).expect("written before it ended");
        serde_json::from_slice(&bytes).expect("as written")
    }

    /// Waits until all ranks have ended successfully.
    pub fn expect_success(mut self) {
        let ranks = 0..self.children.len();
        let exits: Vec<ExitStatus> = ranks.clone().map(|rank| self.wait(rank)).collect();
        let describe = |rank: usize| format!("rank {rank}: {}\n{}", exits[rank], self.log(rank));
        let logs: Vec<String> = ranks.map(describe).collect();
        assert!(exits.iter().all(|exit| exit.success()), "{}", logs.join("\n"));
    }

    pub fn log(&self, rank: usize) -> String {
        std::fs::read_to_string(self.folder.join(format!("log-{rank}"))).unwrap_or_default()
    }

    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Ranks) -> bool) {
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
            // Fails for ranks that have ended.
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

/// Identities of a new world on this machine, with its own secret.
pub fn identities(topology: Topology) -> Vec<Identity> {
    let token = token::random().expect("random bytes");
    let port = free_port();
    let identity = |rank: usize| Identity {
        rank,
        size: topology.nodes * topology.per_node,
        local_rank: rank % topology.per_node,
        local_size: topology.per_node,
        node: rank / topology.per_node,
        master_addr: "127.0.0.1".into(),
        master_port: port,
        token: TokenSource::Env(token.clone()),
        generation: 0,
        bind: None,
        listener_fd: None,
        transport: Transport { socks5: topology.via, encrypt: topology.encrypt },
        launcher: Launcher::Explicit,
    };
    (0..topology.nodes * topology.per_node).map(identity).collect()
}

fn start_one(test: &str, world: &str, identity: &Identity, folder: &Path) -> Child {
    let log = std::fs::File::create(folder.join(format!("log-{}", identity.rank)))
        .expect("a log for the rank");
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    // If an ignored test runs, its ranks must run it too.
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    let identity = serde_json::to_string(identity).expect("plain data");
    command.env(IDENTITY, identity).env(WORLD, world).env(FOLDER, folder);
    // A backtrace would hide the error in the log.
    command.env("RUST_BACKTRACE", "0");
    command.stdout(log.try_clone().expect("a second handle")).stderr(log);
    command.spawn().expect("this binary can be started")
}
