//! Ranks that are killed, stopped, stuck, panic or leave: every survivor blames the right rank, and its
//! error contains the call. The cause shows how the failure was detected, so no test measures time.

use crate::processes::{Topology, hosts, shared_memory, tcp};
use crate::ranks::{RankError, Ranks, TestRank, options, spawn};
use lockstep_comm::{Cause, Error, Op, Options, World, on_threads_with};
use std::time::Duration;

const RANKS: usize = 4;

fn worlds() -> [(&'static str, Topology); 3] {
    [("shm", shared_memory(RANKS)), ("tcp", tcp(RANKS)), ("hosts", hosts(2, 2))]
}

/// Makes calls of several kinds until one fails.
fn call_forever(world: &World) -> Result<(), Error> {
    let half =
        world.split(Some((world.rank() % 2) as i64), 0, "half")?.expect("all ranks have a color");
    loop {
        let started = half.start_all_reduce(vec![1.0f32; 300], Op::Sum);
        world.all_reduce(&mut [1.0f32; 5000], Op::Sum)?;
        world.broadcast(&mut [1i32; 70], 1)?;
        started.wait()?;
        world.barrier()?;
    }
}

/// Joins and calls until one call fails.
fn join_and_call(rank: &TestRank) -> Result<(), Error> {
    let world = rank.join()?;
    rank.mark("joined");
    call_forever(&world)
}

/// Asserts that all ranks except the victim blame it, for this cause; returns their errors.
fn survivors_blame(ranks: &mut Ranks, victim: usize, cause: Cause) -> Vec<RankError> {
    let survivors = (0..RANKS).filter(|r| *r != victim);
    survivors
        .map(|rank| {
            let error = ranks.error(rank);
            let blamed = (error.culprit, error.cause);
            assert_eq!(blamed, (Some(victim), Some(cause)), "rank {rank}: {error:?}");
            error
        })
        .collect()
}

#[test]
fn default_timeouts_are_as_documented() {
    let options = Options::default();
    assert_eq!(options.timeout, Duration::from_secs(30));
    assert_eq!(options.heartbeat, Duration::from_secs(5));
}

#[test]
fn a_killed_rank_is_blamed() {
    let test = "failures::a_killed_rank_is_blamed";
    for (name, topology) in worlds() {
        for victim in [0, 2] {
            let world = format!("{name}-{victim}");
            let before = shm_files();
            let Some(mut ranks) = spawn(test, &world, topology, options(), join_and_call) else {
                continue;
            };
            ranks.wait_for_mark("joined", 0..RANKS);
            // Usually in the middle of a call; the result must be the same at any time.
            std::thread::sleep(Duration::from_millis(50));
            ranks.signal(victim, libc::SIGKILL);
            for error in survivors_blame(&mut ranks, victim, Cause::Died) {
                assert!(error.text.contains(&format!("rank {victim} ")), "{}", error.text);
                assert!(error.text.contains(" in group "), "{}", error.text);
            }
            assert_eq!(shm_files(), before, "files are left in /dev/shm");
        }
    }
}

#[test]
fn a_stopped_rank_is_blamed_after_the_heartbeat_timeout() {
    let test = "failures::a_stopped_rank_is_blamed_after_the_heartbeat_timeout";
    for (name, topology) in worlds() {
        for victim in [0, 1] {
            let world = format!("{name}-{victim}");
            // Calls have a longer timeout than the heartbeat, as by default.
            let heartbeat = Duration::from_secs(3);
            let options = Options { heartbeat, timeout: Duration::from_secs(120), ..options() };
            let Some(mut ranks) = spawn(test, &world, topology, options, join_and_call) else {
                continue;
            };
            ranks.wait_for_mark("joined", 0..RANKS);
            ranks.signal(victim, libc::SIGSTOP);
            for error in survivors_blame(&mut ranks, victim, Cause::Silent) {
                // Found by the heartbeat, not by the timeout of a call.
                assert!(!error.text.contains("no progress"), "{}", error.text);
            }
        }
    }
}

#[test]
fn a_rank_stuck_outside_of_calls_is_blamed_at_the_timeout() {
    let test = "failures::a_rank_stuck_outside_of_calls_is_blamed_at_the_timeout";
    for (name, topology) in worlds() {
        let stuck = |rank: &TestRank| {
            let world = rank.join()?;
            for _ in 0..10 {
                world.all_reduce(&mut [1.0f32; 5000], Op::Sum)?;
            }
            if rank.rank() == 2 {
                std::thread::sleep(Duration::from_secs(600));
            }
            world.all_reduce(&mut [1.0f32; 5000], Op::Sum)
        };
        let options = Options { timeout: Duration::from_secs(4), ..options() };
        let Some(mut ranks) = spawn(test, name, topology, options, stuck) else { continue };
        for error in survivors_blame(&mut ranks, 2, Cause::Late) {
            let has = |what: &str| assert!(error.text.contains(what), "{}", error.text);
            has("all_reduce #1");
            has("f32 × 5000 = 19.5 KiB, sum");
            has("in group world");
            has("waited ");
            has("rank 2 has not reached all_reduce #1");
        }
    }
}

#[test]
fn a_rank_that_aborts_panics_or_leaves_is_blamed_with_its_reason() {
    let test = "failures::a_rank_that_aborts_panics_or_leaves_is_blamed_with_its_reason";
    for (name, topology) in worlds() {
        let ways = ["abort", "exit", "panic", "leave"];
        for (how, victim) in ways.into_iter().flat_map(|way| [(way, 0), (way, 2)]) {
            let ending = move |rank: &TestRank| {
                let world = rank.join()?;
                world.barrier()?;
                if rank.rank() != victim {
                    return call_forever(&world);
                }
                match how {
                    "abort" => world.abort("the disk is full"),
                    "exit" => {
                        world.abort("the disk is full");
                        std::process::exit(1);
                    }
                    "panic" => panic!("expected by the test"),
                    _ => {}
                }
                Ok(())
            };
            let world = format!("{name}-{how}-{victim}");
            let Some(mut ranks) = spawn(test, &world, topology, options(), ending) else {
                continue;
            };
            let (cause, reason) = match how {
                "abort" | "exit" => (Cause::Failed, "aborted: the disk is full"),
                "panic" => (Cause::Failed, "aborted: it panicked"),
                _ => (Cause::Left, "has left the world"),
            };
            for error in survivors_blame(&mut ranks, victim, cause) {
                assert!(error.text.contains(reason), "{}", error.text);
            }
        }
    }
}

#[test]
fn a_thread_that_leaves_is_blamed() {
    let errors = on_threads_with(&options(), 3, |world| match world.rank() {
        1 => None,
        _ => world.barrier().err(),
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.culprit(), error.cause()), (Some(1), Some(Cause::Left)), "{error}");
    }
}

/// Threads reduce in each other's buffers: a call that fails must not return while a peer still writes to
/// the caller's buffer.
#[test]
fn no_peer_writes_to_the_buffer_of_a_failed_call() {
    for round in 0..20 {
        on_threads_with(&options(), 4, |world| {
            std::thread::scope(|scope| {
                let aborted = world.group().rank() == 3;
                if aborted {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_micros(500 * round));
                        world.abort("during a call");
                    });
                }
                let mut buffer = vec![1.0f32; 1 << 19];
                while world.all_reduce(&mut buffer, Op::Max).is_ok() {}
                buffer.fill(7.0);
                std::thread::sleep(Duration::from_millis(3));
                assert!(buffer.iter().all(|x| *x == 7.0), "a peer wrote after the call had ended");
            });
        });
    }
}

#[test]
fn a_rank_killed_while_groups_are_created_is_blamed() {
    let test = "failures::a_rank_killed_while_groups_are_created_is_blamed";
    for (name, topology) in worlds() {
        let splitting = |rank: &TestRank| {
            let world = rank.join()?;
            rank.mark("joined");
            loop {
                let color = (world.rank() / 2) as i64;
                let pair = world.split(Some(color), 0, "pair")?.expect("all ranks have a color");
                let mut buffer = pair.symmetric::<f32>(100)?;
                pair.all_reduce(&mut buffer, Op::Sum)?;
            }
        };
        for victim in [0, 2] {
            let world = format!("{name}-{victim}");
            let Some(mut ranks) = spawn(test, &world, topology, options(), splitting) else {
                continue;
            };
            ranks.wait_for_mark("joined", 0..RANKS);
            std::thread::sleep(Duration::from_millis(30));
            ranks.signal(victim, libc::SIGKILL);
            survivors_blame(&mut ranks, victim, Cause::Died);
        }
    }
}

/// Rank 2 is killed after it has connected. Depending on whether rank 0 has received its registration, it is
/// reported as lost or as missing.
#[test]
fn a_rank_killed_during_rendezvous_is_named() {
    let test = "failures::a_rank_killed_during_rendezvous_is_named";
    let waiting = |rank: &TestRank| {
        rank.mark("started");
        // Rank 3 never joins, so the rendezvous is not complete when rank 2 is killed.
        if rank.rank() == 3 {
            std::thread::sleep(Duration::from_secs(600));
        }
        // Other ranks wait longer than rank 0, which reports the failure to them.
        let join_timeout = Duration::from_secs(if rank.rank() == 0 { 15 } else { 120 });
        World::join(&rank.identity, &Options { join_timeout, ..rank.options.clone() }).map(|_| ())
    };
    for (name, topology) in [("shm", shared_memory(RANKS)), ("tcp", tcp(RANKS))] {
        let Some(mut ranks) = spawn(test, name, topology, options(), waiting) else { continue };
        ranks.wait_for_mark("started", 0..RANKS);
        std::thread::sleep(Duration::from_secs(1));
        ranks.signal(2, libc::SIGKILL);
        for rank in [0, 1] {
            let text = ranks.error(rank).text;
            let lost = text.contains("lost the connection to rank 2 during rendezvous");
            assert!(lost || text.contains("missing: 2, 3"), "{text}");
        }
    }
}

#[test]
fn the_flight_record_contains_the_last_thousand_operations() {
    let test = "failures::the_flight_record_contains_the_last_thousand_operations";
    let many = |rank: &TestRank| {
        let world = rank.join()?;
        for _ in 0..1500 {
            world.all_reduce(&mut [1.0f32; 10], Op::Sum)?;
        }
        if rank.rank() == 1 {
            world.abort("end of the test");
        }
        world.all_reduce(&mut [1.0f32; 10], Op::Sum)
    };
    let Some(mut ranks) = spawn(test, "shm", shared_memory(2), options(), many) else { return };
    ranks.error(0);
    let bytes = std::fs::read(ranks.folder.join("flight-rank-0.json")).expect("the file exists");
    let record: serde_json::Value = serde_json::from_slice(&bytes).expect("valid JSON");
    assert_eq!(record["culprit"], 1);
    assert_eq!(record["cause"], "failed");
    let operations = record["operations"].as_array().expect("a list");
    assert_eq!(operations.len(), 1000);
    let last = operations.last().expect("a thousand");
    assert_eq!((&last["kind"], &last["group"]), (&"all_reduce".into(), &"world".into()));
    assert_eq!((&last["bytes"], &last["failed"]), (&40.into(), &true.into()));
    let sequence = |entry: &serde_json::Value| entry["sequence"].as_u64().expect("a number");
    assert_eq!(sequence(last) - sequence(&operations[0]), 999);
    let times = |entry: &serde_json::Value| {
        entry["started_us"].as_u64().zip(entry["finished_us"].as_u64()).expect("both")
    };
    assert!(operations.iter().map(times).all(|(start, end)| start <= end));
}

fn shm_files() -> Vec<std::ffi::OsString> {
    let Ok(folder) = std::fs::read_dir("/dev/shm") else { return vec![] };
    let mut names: Vec<_> = folder.flatten().map(|entry| entry.file_name()).collect();
    names.retain(|name| name.to_string_lossy().contains("lockstep"));
    names.sort();
    names
}
