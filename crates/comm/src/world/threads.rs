//! Worlds of threads in one process: for tests, for examples, and for programs that are their own
//! cluster.

use crate::group::Group;
use crate::health::board::Board;
use crate::health::recorder::Recorder;
use crate::health::watch::Patience;
use crate::memory::arena::Arena;
use crate::world::context::Context;
use crate::world::options::Options;
use crate::world::{WORLD_ID, World};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// Runs the closure as `ranks` ranks, each on a thread of its own, and gives their results in order.
/// A panic of one of them is passed on, after all have ended.
///
/// ```
/// let ranks = lockstep_comm::on_threads(4, |world| world.rank());
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// ```
pub fn on_threads<R: Send>(ranks: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    on_threads_with(&Options::default(), ranks, rank)
}

/// A world of one: every call is the identity.
///
/// ```
/// # use lockstep_comm::{Op, alone};
/// let mut numbers = [1.5f32, 2.5];
/// alone().all_reduce(&mut numbers, Op::Sum).unwrap();
/// assert_eq!(numbers, [1.5, 2.5]);
/// ```
pub fn alone() -> World {
    on_threads(1, |world| world).remove(0)
}

/// Like [`on_threads`], with options.
pub fn on_threads_with<R: Send>(
    options: &Options,
    ranks: usize,
    rank: impl Fn(World) -> R + Sync,
) -> Vec<R> {
    assert!(ranks > 0, "a world has at least one rank");
    let memory = "memory for a world of threads can be had";
    let (board, _board_offer) = Board::create(ranks).expect(memory);
    let (arena, _arena_offer) = Arena::create(ranks).expect(memory);
    let board = Arc::new(board);
    let world = |number: usize| {
        let context = Context {
            rank: number,
            hosts: vec![0; ranks],
            board: board.clone(),
            timeout: options.timeout,
            patience: Patience::for_ranks(ranks),
            sockets: None,
            recorder: Recorder::new(number, options.record.clone()),
            direct_access: Arc::new(AtomicBool::new(options.direct_access)),
            may_pull: Arc::default(),
            heaps: Arc::default(),
            measured: options.constants.map_or_else(OnceLock::new, OnceLock::from),
        };
        let members = (0..ranks).collect();
        World::new(Group::over_links(Arc::new(context), WORLD_ID, "world", members, &arena), None)
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
