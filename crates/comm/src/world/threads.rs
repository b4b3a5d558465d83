//! Worlds of threads in one process, for tests, examples and single-process programs.

use crate::group::{Group, GroupSpec};
use crate::health::board::Board;
use crate::health::recorder::Recorder;
use crate::health::watch::SpinPolicy;
use crate::lane::LocalAccess;
use crate::memory::arena::Arena;
use crate::world::World;
use crate::world::context::Context;
use crate::world::options::Options;
use lockstep_types::trace::Tracer;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// Runs the closure as `ranks` ranks, each on its own thread, and returns their results in rank order. A
/// panic of one of them is resumed after all have ended.
///
/// ```
/// let ranks = lockstep_comm::on_threads(4, |world| world.rank());
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// ```
pub fn on_threads<R: Send>(ranks: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    on_threads_with(&Options::default(), ranks, rank)
}

/// A world of one rank: every call is the identity.
///
/// ```
/// # use lockstep_comm::{Op, single_rank};
/// let mut numbers = [1.5f32, 2.5];
/// single_rank().all_reduce(&mut numbers, Op::Sum).unwrap();
/// assert_eq!(numbers, [1.5, 2.5]);
/// ```
pub fn single_rank() -> World {
    on_threads(1, |world| world).remove(0)
}

/// Like [`on_threads`], with options.
pub fn on_threads_with<R: Send>(
    options: &Options,
    ranks: usize,
    rank: impl Fn(World) -> R + Sync,
) -> Vec<R> {
    assert!(ranks > 0, "a world has at least one rank");
    let memory = "shared memory is available";
    let (board, _board_offer) = Board::create(ranks).expect(memory);
    let (arena, _arena_offer) = Arena::create(ranks).expect(memory);
    let board = Arc::new(board);
    let world = |number: usize| {
        let context = Context {
            rank: number,
            hosts: vec![0; ranks],
            board: board.clone(),
            timeout: options.timeout,
            spin_policy: SpinPolicy::for_ranks(ranks),
            sockets: None,
            recorder: Recorder::new(number, options.record.clone()),
            tracer: Tracer::default(),
            access: LocalAccess {
                direct: Arc::new(AtomicBool::new(options.direct_access)),
                ..LocalAccess::default()
            },
            measured: options.link_costs.map_or_else(OnceLock::new, OnceLock::from),
        };
        World::new(Group::over_links(GroupSpec::world(Arc::new(context)), &arena), None)
    };
    let worlds: Vec<World> = (0..ranks).map(world).collect();
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = worlds.into_iter().map(|w| scope.spawn(move || rank(w))).collect();
        let results: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        let or_panic =
            |r: std::thread::Result<R>| r.unwrap_or_else(|p| std::panic::resume_unwind(p));
        results.into_iter().map(or_panic).collect()
    })
}
