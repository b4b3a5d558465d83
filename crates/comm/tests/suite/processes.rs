//! Running a test's closure as ranks that are processes: the test starts this very binary once per
//! rank, with itself as the only test, and each copy joins the world and runs the closure.

use crate::ranks::{Ranks, own_identity};
use lockstep_comm::{LocalLinks, Options, World};
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
        Err(_) => Ranks::start(test, world, spread).end_well(),
    }
}

fn run_rank(spread: Spread, rank: impl Fn(World)) {
    let options = Options { local: spread.links, ..Options::default() };
    rank(World::join(&own_identity(), &options).expect("the world forms"));
    std::process::exit(0);
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
