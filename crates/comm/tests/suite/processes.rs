//! Runs a test's closure on ranks that are processes: the test starts this binary once per rank, with
//! itself as the only test, and each copy joins the world and runs the closure.

use crate::ranks::{Ranks, own_identity};
use lockstep_comm::{LocalLinks, Options, World};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Placement and links of the ranks of a test.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    pub nodes: usize,
    pub per_node: usize,
    pub links: LocalLinks,
    /// SOCKS5 proxy between the ranks.
    pub via: Option<SocketAddr>,
    pub encrypt: bool,
}

pub fn shared_memory(ranks: usize) -> Topology {
    Topology {
        nodes: 1,
        per_node: ranks,
        links: LocalLinks::SharedMemory,
        via: None,
        encrypt: false,
    }
}

pub fn tcp(ranks: usize) -> Topology {
    Topology { links: LocalLinks::Tcp, ..shared_memory(ranks) }
}

/// Several simulated hosts.
pub fn hosts(nodes: usize, per_node: usize) -> Topology {
    Topology { nodes, ..shared_memory(per_node) }
}

/// Environment variable: the world that a process belongs to, if a test has several.
pub const WORLD: &str = "LOCKSTEP_TEST_WORLD";

/// Runs `rank` on processes. `test` is the path of the calling test; `world` distinguishes several calls
/// in one test.
pub fn on_processes(test: &str, world: &str, topology: Topology, rank: impl Fn(World)) {
    match std::env::var(WORLD) {
        Ok(name) if name == world => run_rank(topology, rank),
        // This process is a rank of another world of the test.
        Ok(_) => {}
        Err(_) => Ranks::start(test, world, topology).expect_success(),
    }
}

fn run_rank(topology: Topology, rank: impl Fn(World)) {
    let options = Options { local: topology.links, ..Options::default() };
    rank(World::join(&own_identity(), &options).expect("the world starts"));
    std::process::exit(0);
}

/// A free port below the ephemeral range, so that no outgoing connection takes it before it is used.
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
