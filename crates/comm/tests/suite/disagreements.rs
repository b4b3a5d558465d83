//! Ranks that make different calls: an error on all of them that contains both calls, for every difference
//! and every transport; never a hang, and never wrong data.

use crate::processes::{Topology, hosts, shared_memory, tcp};
use crate::ranks::{TestRank, options, spawn};
use lockstep_comm::{Algo, Cause, Collective, Error, Group, Op, Options, World, on_threads_with};
use std::time::Duration;

const RANKS: usize = 3;
/// The rank that makes a different call.
const ODD: usize = 1;

type TestCall = fn(&Group) -> Result<(), Error>;

/// The call of most ranks, the call of the odd one, and the collective whose algorithms are tested.
struct Disagreement {
    name: &'static str,
    kind: Collective,
    most: TestCall,
    odd: TestCall,
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

fn gather<const ROOT: usize, const N: usize>(group: &Group) -> Result<(), Error> {
    group.gather(&[1.0f32; N], &mut vec![0.0; N * group.size()], ROOT)
}

fn scatter<const ROOT: usize, const N: usize>(group: &Group) -> Result<(), Error> {
    group.scatter(&vec![1.0f32; N * group.size()], &mut [0.0; N], ROOT)
}

fn exchange<const N: usize>(group: &Group) -> Result<(), Error> {
    let n = group.size();
    group.all_to_all(&vec![1.0f32; N * n], &mut vec![0.0; N * n])
}

/// All ranks send `SENT` elements to each rank and expect 5 from each.
fn exchange_uneven<const SENT: usize>(group: &Group) -> Result<(), Error> {
    let n = group.size();
    let mut output = vec![0.0f32; 5 * n];
    let mut sent = vec![SENT; n];
    // The count for the rank itself is checked before the others are asked.
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

const DISAGREEMENTS: &[Disagreement] = &[
    Disagreement {
        name: "kind",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: |g| g.with_algo(None).barrier(),
    },
    Disagreement {
        name: "kind, large buffer",
        kind: Collective::AllReduce,
        most: reduce_all::<200_000>,
        odd: |g| g.with_algo(None).broadcast(&mut [1.0f32; 200_000], ODD),
    },
    Disagreement {
        name: "type",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: |g| g.all_reduce(&mut [1i32; 100], Op::Sum),
    },
    Disagreement {
        name: "length",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: reduce_all::<101>,
    },
    Disagreement {
        name: "length, large buffer",
        kind: Collective::AllReduce,
        most: reduce_all::<200_000>,
        odd: reduce_all::<7>,
    },
    Disagreement {
        name: "operation",
        kind: Collective::AllReduce,
        most: reduce_all::<100>,
        odd: |g| g.all_reduce(&mut [1.0f32; 100], Op::Max),
    },
    Disagreement {
        name: "order",
        kind: Collective::Broadcast,
        most: |g| from_root::<0>(g).and_then(|()| g.with_algo(None).barrier()),
        odd: |g| g.with_algo(None).barrier().and_then(|()| from_root::<0>(g)),
    },
    Disagreement {
        name: "root, all ranks send",
        kind: Collective::Broadcast,
        most: from_root::<0>,
        odd: from_root::<ODD>,
    },
    Disagreement {
        name: "root, all ranks wait",
        kind: Collective::Broadcast,
        most: from_root::<ODD>,
        odd: from_root::<0>,
    },
    Disagreement {
        name: "root of a reduction",
        kind: Collective::Reduce,
        most: to_root::<0>,
        odd: to_root::<ODD>,
    },
    Disagreement {
        name: "root of a reduction, all ranks send",
        kind: Collective::Reduce,
        most: to_root::<ODD>,
        odd: to_root::<0>,
    },
    Disagreement {
        name: "root of a gather",
        kind: Collective::Gather,
        most: gather::<0, 9>,
        odd: gather::<ODD, 9>,
    },
    Disagreement {
        name: "length of a gather",
        kind: Collective::Gather,
        most: gather::<0, 9>,
        odd: gather::<0, 8>,
    },
    Disagreement {
        name: "root of a scatter",
        kind: Collective::Scatter,
        most: scatter::<0, 9>,
        odd: scatter::<ODD, 9>,
    },
    Disagreement {
        name: "length of a scatter",
        kind: Collective::Scatter,
        most: scatter::<0, 9>,
        odd: scatter::<0, 10>,
    },
    Disagreement {
        name: "length of an all-to-all",
        kind: Collective::AllToAll,
        most: exchange::<9>,
        odd: exchange::<10>,
    },
    Disagreement {
        name: "counts of an uneven all-to-all",
        kind: Collective::AllToAllV,
        most: exchange_uneven::<5>,
        odd: exchange_uneven::<6>,
    },
    Disagreement {
        name: "length of a reduce-scatter",
        kind: Collective::ReduceScatter,
        most: scatter_sum::<90>,
        odd: scatter_sum::<93>,
    },
    Disagreement {
        name: "length of an all-gather",
        kind: Collective::AllGather,
        most: gather_all::<90>,
        odd: gather_all::<93>,
    },
    Disagreement {
        name: "length of a message",
        kind: Collective::SendRecv,
        most: |g| if g.rank() == 0 { g.send(&[1.0f32; 10], ODD) } else { Ok(()) },
        odd: |g| g.receive(&mut [0.0f32; 11], 0),
    },
    Disagreement {
        name: "type of a message",
        kind: Collective::SendRecv,
        most: |g| if g.rank() == 0 { g.send(&[1.0f32; 10], ODD) } else { Ok(()) },
        odd: |g| g.receive(&mut [0i32; 10], 0),
    },
];

/// One disagreement in one world. A rank that could finish its call must get the error in the next one.
fn disagree(world: &World, case: &Disagreement, algo: Option<Algo>) -> Result<(), Error> {
    let group = world.with_algo(algo);
    let call = if world.rank() == ODD { case.odd } else { case.most };
    call(&group).and_then(|()| world.barrier())
}

/// Fails unless a rank got the error of a disagreement.
fn expect_error(result: Result<(), Error>, case: &Disagreement, algo: Option<Algo>, rank: usize) {
    let at = format!("{} with {algo:?}, rank {rank}", case.name);
    let error = result.expect_err(&at);
    assert_eq!(error.cause(), Some(Cause::Disagreed), "{at}: {error}");
    let text = error.to_string();
    assert!(text.contains("ranks disagree in group world"), "{at}: {text}");
    assert!(text.matches(" calls ").count() == 2, "{at}: {text}");
}

/// Every disagreement with every algorithm that the topology allows.
fn all_cases(one_host: bool) -> Vec<(&'static Disagreement, Option<Algo>)> {
    let mut all = Vec::new();
    for case in DISAGREEMENTS {
        all.push((case, None));
        if case.kind != Collective::SendRecv {
            let fits = |a: &&Algo| one_host || **a != Algo::Direct;
            all.extend(Algo::of(case.kind).iter().filter(fits).map(|a| (case, Some(*a))));
        }
    }
    all
}

#[test]
fn all_disagreements_on_threads() {
    for (case, algo) in all_cases(true) {
        on_threads_with(&options(), RANKS, |world| {
            expect_error(disagree(&world, case, algo), case, algo, world.rank());
        });
    }
}

/// One set of processes that starts a new world, of the next generation, for every case.
fn on_worlds(test: &str, topology: Topology, one_host: bool) {
    let ranks = spawn(test, "all", topology, options(), |rank: &TestRank| {
        for (generation, (case, algo)) in all_cases(one_host).into_iter().enumerate() {
            let mut identity = rank.identity.clone();
            identity.generation = generation as u32;
            // The others may disagree while a rank is still in the last call of joining, which then fails.
            let result = World::join(&identity, &rank.options)
                .and_then(|world| disagree(&world, case, algo));
            expect_error(result, case, algo, identity.rank);
        }
        Ok(())
    });
    ranks.into_iter().for_each(|ranks| ranks.expect_success());
}

#[test]
fn all_disagreements_over_shared_memory() {
    on_worlds("disagreements::all_disagreements_over_shared_memory", shared_memory(RANKS), true);
}

#[test]
fn all_disagreements_over_tcp() {
    on_worlds("disagreements::all_disagreements_over_tcp", tcp(RANKS), false);
}

#[test]
fn all_disagreements_on_two_hosts() {
    on_worlds("disagreements::all_disagreements_on_two_hosts", hosts(2, 2), false);
}

/// Different algorithms may never exchange a message: the disagreement is found on the board.
#[test]
fn ranks_that_force_different_algorithms() {
    for (most, odd) in
        [(Algo::Direct, Algo::Ring), (Algo::Ring, Algo::Tree), (Algo::Halving, Algo::Direct)]
    {
        on_threads_with(&options(), RANKS, |world| {
            let algo = if world.rank() == ODD { odd } else { most };
            let mut buffer = [1.0f32; 100];
            let result = world.with_algo(Some(algo)).all_reduce(&mut buffer, Op::Sum);
            let error = result.and_then(|()| world.barrier()).expect_err("the ranks disagree");
            assert_eq!(error.cause(), Some(Cause::Disagreed), "{error}");
        });
    }
}

/// Calls in incompatible orders are reported as a deadlock.
#[test]
fn two_groups_called_in_opposite_order() {
    let options = Options { timeout: Duration::from_secs(5), ..options() };
    on_threads_with(&options, 2, |world| {
        let first = world.split(Some(0), 0, "first").unwrap().unwrap();
        let second = world.split(Some(0), 0, "second").unwrap().unwrap();
        let mine = if world.rank() == 0 { first } else { second };
        let error = mine.barrier().expect_err("deadlock");
        assert_eq!(error.cause(), Some(Cause::Late), "{error}");
        assert!(error.to_string().contains("deadlock: ranks "), "{error}");
    });
}

#[test]
fn symmetric_buffers_of_different_lengths() {
    on_threads_with(&options(), RANKS, |world| {
        let len = if world.rank() == ODD { 5000 } else { 3000 };
        let Err(error) = world.symmetric::<f32>(len) else { panic!("the ranks disagree") };
        assert_eq!(error.culprit(), Some(ODD), "{error}");
        assert!(error.to_string().contains("same length"), "{error}");
    });
}
