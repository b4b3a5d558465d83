//! Ranks that do not make the same call: an error on all of them that prints both calls, whatever
//! differs and whatever carries the bytes; never a hang and never another rank's data.

use crate::processes::{Spread, hosts, shared_memory, tcp};
use crate::ranks::{impatient, spawn};
use lockstep_comm::{Algo, Cause, Collective, Error, Group, Op, World, on_threads_with};

const RANKS: usize = 3;
/// The rank that is of another mind.
const ODD: usize = 1;

type Act = fn(&Group) -> Result<(), Error>;

/// What most ranks call, what the odd one calls, and the kind whose algorithms are tried.
struct Quarrel {
    about: &'static str,
    kind: Collective,
    most: Act,
    odd: Act,
}

fn reduce_all<const N: usize>(group: &Group) -> Result<(), Error> {
    group.all_reduce(&mut [1.0f32; N], Op::Sum)
}

fn from_root<const ROOT: usize>(group: &Group) -> Result<(), Error> {
    group.broadcast(&mut [1.0f32; 100], ROOT)
}

fn to_root<const ROOT: usize>(group: &Group) -> Result<(), Error> {
    group.reduce(&mut [1.0f32; 100], Op::Sum, ROOT)
}

fn collect<const ROOT: usize, const N: usize>(group: &Group) -> Result<(), Error> {
    group.gather(&[1.0f32; N], &mut vec![0.0; N * group.size()], ROOT)
}

fn deal<const ROOT: usize, const N: usize>(group: &Group) -> Result<(), Error> {
    group.scatter(&vec![1.0f32; N * group.size()], &mut [0.0; N], ROOT)
}

fn exchange<const N: usize>(group: &Group) -> Result<(), Error> {
    let n = group.size();
    group.all_to_all(&vec![1.0f32; N * n], &mut vec![0.0; N * n])
}

/// Everybody sends `SENT` elements to everybody and expects 5 from each.
fn exchange_uneven<const SENT: usize>(group: &Group) -> Result<(), Error> {
    let n = group.size();
    let mut output = vec![0.0f32; 5 * n];
    let mut sent = vec![SENT; n];
    // What one sends to oneself is checked before anybody else is asked.
    sent[group.rank()] = 5;
    let input = vec![1.0f32; sent.iter().sum()];
    group.all_to_all_v(&input, &sent, &mut output, &vec![5; n])
}

fn scatter_sum<const N: usize>(group: &Group) -> Result<(), Error> {
    let own = lockstep_comm::shard_range(N, group.size(), group.rank()).len();
    group.reduce_scatter(&[1.0f32; N], &mut vec![0.0; own], Op::Sum)
}

fn gather_all<const N: usize>(group: &Group) -> Result<(), Error> {
    let own = lockstep_comm::shard_range(N, group.size(), group.rank()).len();
    group.all_gather(&vec![1.0f32; own], &mut [0.0; N])
}

const QUARRELS: &[Quarrel] = &[
    Quarrel {
        about: "kind",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: |g| g.with_algo(None).barrier(),
    },
    Quarrel {
        about: "kind of much data",
        kind: Collective::AllReduce,
        most: reduce_all::<200_000>,
        odd: |g| g.with_algo(None).broadcast(&mut [1.0f32; 200_000], ODD),
    },
    Quarrel {
        about: "type",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: |g| g.all_reduce(&mut [1i32; 100], Op::Sum),
    },
    Quarrel {
        about: "length",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: reduce_all::<101>,
    },
    Quarrel {
        about: "length of much data",
        kind: Collective::AllReduce,
        most: reduce_all::<200_000>,
        odd: reduce_all::<7>,
    },
    Quarrel {
        about: "operation",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: |g| g.all_reduce(&mut [1.0f32; 100], Op::Max),
    },
    Quarrel {
        about: "order",
        kind: Collective::Broadcast,
        most: |g| from_root::<0>(g).and_then(|()| g.with_algo(None).barrier()),
        odd: |g| g.with_algo(None).barrier().and_then(|()| from_root::<0>(g)),
    },
    Quarrel {
        about: "root, everybody sends",
        kind: Collective::Broadcast,
        most: from_root::<0>,
        odd: from_root::<ODD>,
    },
    Quarrel {
        about: "root, everybody waits",
        kind: Collective::Broadcast,
        most: from_root::<ODD>,
        odd: from_root::<0>,
    },
    Quarrel {
        about: "root of a reduction",
        kind: Collective::Reduce,
        most: to_root::<0>,
        odd: to_root::<ODD>,
    },
    Quarrel {
        about: "root of a reduction, everybody sends",
        kind: Collective::Reduce,
        most: to_root::<ODD>,
        odd: to_root::<0>,
    },
    Quarrel {
        about: "root of a gather",
        kind: Collective::Gather,
        most: collect::<0, 9>,
        odd: collect::<ODD, 9>,
    },
    Quarrel {
        about: "length of a gather",
        kind: Collective::Gather,
        most: collect::<0, 9>,
        odd: collect::<0, 8>,
    },
    Quarrel {
        about: "root of a scatter",
        kind: Collective::Scatter,
        most: deal::<0, 9>,
        odd: deal::<ODD, 9>,
    },
    Quarrel {
        about: "length of a scatter",
        kind: Collective::Scatter,
        most: deal::<0, 9>,
        odd: deal::<0, 10>,
    },
    Quarrel {
        about: "length of an all-to-all",
        kind: Collective::AllToAll,
        most: exchange::<9>,
        odd: exchange::<10>,
    },
    Quarrel {
        about: "counts of an uneven all-to-all",
        kind: Collective::AllToAllV,
        most: exchange_uneven::<5>,
        odd: exchange_uneven::<6>,
    },
    Quarrel {
        about: "length of a reduce-scatter",
        kind: Collective::ReduceScatter,
        most: scatter_sum::<90>,
        odd: scatter_sum::<93>,
    },
    Quarrel {
        about: "length of an all-gather",
        kind: Collective::AllGather,
        most: gather_all::<90>,
        odd: gather_all::<93>,
    },
    Quarrel {
        about: "length of a message",
        kind: Collective::SendRecv,
        most: |g| if g.rank() == 0 { g.send(&[1.0f32; 10], ODD) } else { Ok(()) },
        odd: |g| g.receive(&mut [0.0f32; 11], 0),
    },
    Quarrel {
        about: "type of a message",
        kind: Collective::SendRecv,
        most: |g| if g.rank() == 0 { g.send(&[1.0f32; 10], ODD) } else { Ok(()) },
        odd: |g| g.receive(&mut [0i32; 10], 0),
    },
];

/// One quarrel on one world; a rank that could finish its call must learn of it in the next.
fn quarrel(world: &World, quarrel: &Quarrel, algo: Option<Algo>) {
    let group = world.with_algo(algo);
    let act = if world.rank() == ODD { quarrel.odd } else { quarrel.most };
    let result = act(&group).and_then(|()| world.barrier());
    let at = format!("{} with {algo:?}, rank {}", quarrel.about, world.rank());
    let error = result.expect_err(&at);
    assert_eq!(error.cause(), Some(Cause::Disagreed), "{at}: {error}");
    let text = error.to_string();
    assert!(text.contains("ranks disagree in group world"), "{at}: {text}");
    assert!(text.matches(" calls ").count() == 2, "{at}: {text}");
}

/// Every quarrel with every algorithm that the topology allows.
fn all_quarrels(one_host: bool) -> Vec<(&'static Quarrel, Option<Algo>)> {
    let mut all = Vec::new();
    for quarrel in QUARRELS {
        all.push((quarrel, None));
        if quarrel.kind != Collective::SendRecv {
            let fits = |a: &&Algo| one_host || **a != Algo::Direct;
            all.extend(Algo::of(quarrel.kind).iter().filter(fits).map(|a| (quarrel, Some(*a))));
        }
    }
    all
}

#[test]
fn every_quarrel_on_threads() {
    for (case, algo) in all_quarrels(true) {
        on_threads_with(&impatient(), RANKS, |world| quarrel(&world, case, algo));
    }
}

/// One set of processes that form a new world, of the next generation, for every quarrel.
fn on_worlds(test: &str, spread: Spread, one_host: bool) {
    let ranks = spawn(test, "all", spread, impatient(), |seat| {
        for (generation, (case, algo)) in all_quarrels(one_host).into_iter().enumerate() {
            let mut identity = seat.identity.clone();
            identity.generation = generation as u32;
            let world = World::join(&identity, &seat.options)?;
            quarrel(&world, case, algo);
        }
        Ok(())
    });
    ranks.into_iter().for_each(|ranks| ranks.end_well());
}

#[test]
fn every_quarrel_over_shared_memory() {
    on_worlds("disagreements::every_quarrel_over_shared_memory", shared_memory(RANKS), true);
}

#[test]
fn every_quarrel_over_tcp() {
    on_worlds("disagreements::every_quarrel_over_tcp", tcp(RANKS), false);
}

#[test]
fn every_quarrel_on_two_hosts() {
    on_worlds("disagreements::every_quarrel_on_two_hosts", hosts(2, 2), false);
}

/// Different algorithms for the same call never meet on a link: the board must tell.
#[test]
fn ranks_that_force_different_algorithms() {
    for (most, odd) in
        [(Algo::Direct, Algo::Ring), (Algo::Ring, Algo::Tree), (Algo::Halving, Algo::Direct)]
    {
        on_threads_with(&impatient(), RANKS, |world| {
            let algo = if world.rank() == ODD { odd } else { most };
            let mut buffer = [1.0f32; 100];
            let result = world.with_algo(Some(algo)).all_reduce(&mut buffer, Op::Sum);
            let error = result.and_then(|()| world.barrier()).expect_err("they disagree");
            assert_eq!(error.cause(), Some(Cause::Disagreed), "{error}");
        });
    }
}

/// Calls in an order that can never meet are told with the whole circle.
#[test]
fn two_groups_called_crosswise() {
    on_threads_with(&impatient(), 2, |world| {
        let first = world.split(Some(0), 0, "first").unwrap().unwrap();
        let second = world.split(Some(0), 0, "second").unwrap().unwrap();
        let mine = if world.rank() == 0 { first } else { second };
        let error = mine.barrier().expect_err("they wait for each other");
        assert_eq!(error.cause(), Some(Cause::Late), "{error}");
        assert!(error.to_string().contains("deadlock: ranks"), "{error}");
    });
}

#[test]
fn symmetric_buffers_of_different_lengths() {
    on_threads_with(&impatient(), RANKS, |world| {
        let len = if world.rank() == ODD { 5000 } else { 3000 };
        let Err(error) = world.symmetric::<f32>(len) else { panic!("they disagree") };
        assert_eq!(error.culprit(), Some(ODD), "{error}");
        assert!(error.to_string().contains("same length"), "{error}");
    });
}
