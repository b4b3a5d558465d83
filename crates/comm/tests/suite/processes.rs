//! Running a test's closure as ranks that are processes: the test starts this very binary once per
//! rank, with itself as the only test, and each copy joins the world and runs the closure.

use lockstep_comm::launch::{Identity, LaunchSpec, Show, launch};
use lockstep_comm::{LocalLinks, Options, World};
use std::ffi::OsString;
use std::sync::atomic::{AtomicU32, Ordering};

/// How the ranks of a test are spread and linked.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub nodes: usize,
    pub per_node: usize,
    pub links: LocalLinks,
}

pub fn shared_memory(ranks: usize) -> Spread {
    Spread { nodes: 1, per_node: ranks, links: LocalLinks::SharedMemory }
}

pub fn tcp(ranks: usize) -> Spread {
    Spread { nodes: 1, per_node: ranks, links: LocalLinks::Tcp }
}

/// Several hosts, played by one.
pub fn hosts(nodes: usize, per_node: usize) -> Spread {
    Spread { nodes, per_node, links: LocalLinks::SharedMemory }
}

/// Which of several worlds of one test a process belongs to.
pub const WORLD: &str = "LOCKSTEP_TEST_WORLD";

/// Runs `rank` on processes. `test` is the path of the calling test, `world` tells several calls in
/// one test apart.
pub fn on_processes(test: &str, world: &str, spread: Spread, rank: impl Fn(World)) {
    match std::env::var(WORLD) {
        Ok(name) if name == world => run_rank(spread, rank),
        // A rank of another world of the same test.
        Ok(_) => {}
        Err(_) => start(test, world, spread),
    }
}

fn run_rank(spread: Spread, rank: impl Fn(World)) {
    let identity = Identity::from_process_env().expect("the launcher set it");
    let options = Options { local: spread.links, ..Options::default() };
    rank(World::join(&identity, &options).expect("the world forms"));
    std::process::exit(0);
}

fn start(test: &str, world: &str, spread: Spread) {
    let program = std::env::current_exe().expect("this binary has a path");
    // An ignored test that runs nevertheless was asked for: its ranks run it, too.
    let arguments = [test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"];
    let command: Vec<OsString> =
        [program.into_os_string()].into_iter().chain(arguments.map(OsString::from)).collect();
    let logs = std::env::temp_dir().join(format!("lockstep-suite-{}-{world}", std::process::id()));
    let port = if spread.nodes > 1 { free_port() } else { 0 };
    let token = lockstep_comm::launch::token::random().expect("random bytes");
    let node = |node_rank: usize| {
        let mut spec =
            LaunchSpec::local(spread.per_node, command.clone(), logs.join(node_rank.to_string()));
        spec.nnodes = spread.nodes;
        spec.node_rank = node_rank;
        spec.master_port = port;
        spec.show = Show::Nothing;
        // A backtrace would push the message out of what is shown of a log.
        spec.extra_env = vec![(WORLD.into(), world.into()), ("RUST_BACKTRACE".into(), "0".into())];
        if spread.nodes > 1 {
            spec.token = lockstep_comm::launch::TokenSource::Env(token.clone());
        }
        let outcome = launch(&spec).expect("the ranks start");
        let report = outcome.failure.map(|f| f.to_string()).unwrap_or_default();
        assert_eq!(outcome.exit_code, 0, "{test} in {world}: {report}");
    };
    std::thread::scope(|scope| {
        let nodes: Vec<_> = (0..spread.nodes).map(|n| scope.spawn(move || node(n))).collect();
        let ends: Vec<_> = nodes.into_iter().map(|n| n.join()).collect();
        ends.into_iter().for_each(|end| end.unwrap_or_else(|p| std::panic::resume_unwind(p)));
    });
    let _ = std::fs::remove_dir_all(logs);
}

/// A port that nobody listens on, and below those that the system hands out to dialers: between this
/// and its use nobody else comes by it.
pub fn free_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    loop {
        let tried = TRIED.fetch_add(1, Ordering::Relaxed);
        let port =
            10_000 + (std::process::id().wrapping_mul(97).wrapping_add(tried) % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
