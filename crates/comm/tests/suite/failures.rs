//! Ranks that are killed, stopped, stuck, panicking or gone: every survivor names the right one, in
//! time, and tells what it was doing.

use crate::processes::{Spread, hosts, shared_memory, tcp};
use crate::ranks::{Ranks, Seat, Verdict, impatient, spawn};
use lockstep_comm::{Cause, Error, Op, Options, World, on_threads_with};
use std::time::{Duration, SystemTime};

const RANKS: usize = 4;

fn worlds() -> [(&'static str, Spread); 3] {
    [("shm", shared_memory(RANKS)), ("tcp", tcp(RANKS)), ("hosts", hosts(2, 2))]
}

/// Makes calls of several kinds until one fails.
fn call_forever(world: &World) -> Result<(), Error> {
    let half = world.split(Some((world.rank() % 2) as i64), 0, "half")?.expect("all have a colour");
    loop {
        let started = half.start_all_reduce(vec![1.0f32; 300], Op::Sum);
        world.all_reduce(&mut [1.0f32; 5000], Op::Sum)?;
        world.broadcast(&mut [1i32; 70], 1)?;
        started.wait()?;
        world.barrier()?;
    }
}

/// Joins, and calls until one fails.
fn keep_calling(seat: &Seat) -> Result<(), Error> {
    let world = seat.join()?;
    seat.mark("joined");
    call_forever(&world)
}

/// All but the victim must blame it, for this cause, within the limit.
fn all_blame(
    ranks: &mut Ranks,
    victim: usize,
    causes: &[Cause],
    since: SystemTime,
    limit: Duration,
) -> Vec<Verdict> {
    let survivors = (0..RANKS).filter(|r| *r != victim);
    let verdicts: Vec<Verdict> = survivors
        .map(|rank| {
            let (verdict, after) = ranks.verdict(rank, since);
            assert_eq!(verdict.guilty, Some(victim), "rank {rank}: {verdict:?}");
            assert!(causes.contains(&verdict.cause.expect("one")), "rank {rank}: {verdict:?}");
            assert!(after < limit, "rank {rank} took {after:?}: {verdict:?}");
            verdict
        })
        .collect();
    verdicts
}

#[test]
fn the_deadlines_are_as_documented() {
    let options = Options::default();
    assert_eq!(options.timeout, Duration::from_secs(30));
    assert_eq!(options.heartbeat, Duration::from_secs(5));
}

#[test]
fn a_killed_rank_is_named_at_once() {
    let test = "failures::a_killed_rank_is_named_at_once";
    for (name, spread) in worlds() {
        for victim in [0, 2] {
            let world = format!("{name}-{victim}");
            let before = shm_files();
            let Some(mut ranks) = spawn(test, &world, spread, impatient(), keep_calling) else {
                continue;
            };
            ranks.await_mark("joined", 0..RANKS);
            std::thread::sleep(Duration::from_millis(50));
            let since = ranks.signal(victim, libc::SIGKILL);
            let limit = Duration::from_secs(1);
            for verdict in all_blame(&mut ranks, victim, &[Cause::Died], since, limit) {
                assert!(verdict.error.contains(&format!("rank {victim} ")), "{}", verdict.error);
                assert!(verdict.error.contains(" in group "), "{}", verdict.error);
            }
            assert_eq!(shm_files(), before, "something was left in /dev/shm");
        }
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_heartbeat() {
    let test = "failures::a_stopped_rank_is_named_at_the_heartbeat";
    for (name, spread) in worlds() {
        for victim in [0, 1] {
            let world = format!("{name}-{victim}");
            // The calls are more patient than the heartbeat, as by default.
            let heartbeat = Duration::from_millis(1500);
            let options = Options { heartbeat, timeout: Duration::from_secs(20), ..impatient() };
            let Some(mut ranks) = spawn(test, &world, spread, options, keep_calling) else {
                continue;
            };
            ranks.await_mark("joined", 0..RANKS);
            let since = ranks.signal(victim, libc::SIGSTOP);
            let limit = heartbeat + Duration::from_secs(1);
            all_blame(&mut ranks, victim, &[Cause::Silent], since, limit);
        }
    }
}

#[test]
fn a_rank_stuck_in_its_own_code_is_named_at_the_deadline() {
    let test = "failures::a_rank_stuck_in_its_own_code_is_named_at_the_deadline";
    for (name, spread) in worlds() {
        let stuck = |seat: &Seat| {
            let world = seat.join()?;
            for _ in 0..10 {
                world.all_reduce(&mut [1.0f32; 5000], Op::Sum)?;
            }
            seat.mark("soon");
            if seat.rank() == 2 {
                std::thread::sleep(Duration::from_secs(60));
            }
            world.all_reduce(&mut [1.0f32; 5000], Op::Sum)
        };
        let timeout = Duration::from_secs(2);
        let options = Options { timeout, ..impatient() };
        let Some(mut ranks) = spawn(test, name, spread, options, stuck) else { continue };
        ranks.await_mark("soon", 0..RANKS);
        let since = SystemTime::now();
        let limit = timeout + Duration::from_millis(1500);
        for verdict in all_blame(&mut ranks, 2, &[Cause::Late], since, limit) {
            let has = |what: &str| assert!(verdict.error.contains(what), "{}", verdict.error);
            has("all_reduce #1");
            has("f32 × 5000 = 19.5 KiB, sum");
            has("in group world");
            has("waited 2.");
            has("rank 2 has not reached all_reduce #1");
        }
    }
}

#[test]
fn a_rank_that_gives_up_panics_or_leaves_is_named_with_its_reason() {
    let test = "failures::a_rank_that_gives_up_panics_or_leaves_is_named_with_its_reason";
    for (name, spread) in worlds() {
        let ways = ["abort", "exit", "panic", "leave"];
        for (how, victim) in ways.into_iter().flat_map(|way| [(way, 0), (way, 2)]) {
            let ending = move |seat: &Seat| {
                let world = seat.join()?;
                world.barrier()?;
                if seat.rank() != victim {
                    return call_forever(&world);
                }
                match how {
                    "abort" => world.abort("the disk is full"),
                    "exit" => {
                        world.abort("the disk is full");
                        std::process::exit(1);
                    }
                    "panic" => panic!("as the test asks"),
                    _ => {}
                }
                Ok(())
            };
            let world = format!("{name}-{how}-{victim}");
            let Some(mut ranks) = spawn(test, &world, spread, impatient(), ending) else {
                continue;
            };
            let (cause, reason) = match how {
                "abort" | "exit" => (Cause::Failed, "aborted: the disk is full"),
                "panic" => (Cause::Failed, "aborted: it panicked"),
                _ => (Cause::Left, "has left the world"),
            };
            let limit = Duration::from_secs(20);
            let verdicts = all_blame(&mut ranks, victim, &[cause], SystemTime::now(), limit);
            for verdict in verdicts {
                assert!(verdict.error.contains(reason), "{}", verdict.error);
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_is_missed_on_threads_as_well() {
    let errors = on_threads_with(&impatient(), 3, |world| match world.rank() {
        1 => None,
        _ => world.barrier().err(),
    });
    for error in errors.into_iter().flatten() {
        assert_eq!((error.culprit(), error.cause()), (Some(1), Some(Cause::Left)), "{error}");
    }
}

/// Threads reduce straight in each other's buffers: a rank whose call fails must not get its buffer
/// back while a peer still writes there.
#[test]
fn a_buffer_that_comes_back_from_a_failed_call_is_the_callers_alone() {
    for round in 0..20 {
        on_threads_with(&impatient(), 4, |world| {
            std::thread::scope(|scope| {
                let aborted = world.group().rank() == 3;
                if aborted {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_micros(500 * round));
                        world.abort("in the middle of it");
                    });
                }
                let mut buffer = vec![1.0f32; 1 << 19];
                while world.all_reduce(&mut buffer, Op::Max).is_ok() {}
                buffer.fill(7.0);
                std::thread::sleep(Duration::from_millis(3));
                assert!(buffer.iter().all(|x| *x == 7.0), "somebody wrote after the call was over");
            });
        });
    }
}

#[test]
fn a_rank_killed_while_groups_are_made_is_named() {
    let test = "failures::a_rank_killed_while_groups_are_made_is_named";
    for (name, spread) in worlds() {
        let splitting = |seat: &Seat| {
            let world = seat.join()?;
            seat.mark("joined");
            loop {
                let colour = (world.rank() / 2) as i64;
                let pair = world.split(Some(colour), 0, "pair")?.expect("all have a colour");
                let mut buffer = pair.symmetric::<f32>(100)?;
                pair.all_reduce(&mut buffer, Op::Sum)?;
            }
        };
        for victim in [0, 2] {
            let world = format!("{name}-{victim}");
            let Some(mut ranks) = spawn(test, &world, spread, impatient(), splitting) else {
                continue;
            };
            ranks.await_mark("joined", 0..RANKS);
            std::thread::sleep(Duration::from_millis(30));
            let since = ranks.signal(victim, libc::SIGKILL);
            all_blame(&mut ranks, victim, &[Cause::Died], since, Duration::from_secs(1));
        }
    }
}

#[test]
fn a_rank_killed_while_the_world_forms_is_named() {
    let test = "failures::a_rank_killed_while_the_world_forms_is_named";
    let waiting = |seat: &Seat| {
        seat.mark("here");
        // Rank 3 never comes, so the others stand in line when rank 2 is killed.
        if seat.rank() == 3 {
            std::thread::sleep(Duration::from_secs(60));
        }
        seat.join().map(|_| ())
    };
    for (name, spread) in [("shm", shared_memory(RANKS)), ("tcp", tcp(RANKS))] {
        let Some(mut ranks) = spawn(test, name, spread, impatient(), waiting) else { continue };
        ranks.await_mark("here", 0..RANKS);
        std::thread::sleep(Duration::from_millis(500));
        let since = ranks.signal(2, libc::SIGKILL);
        for rank in [0, 1] {
            let (verdict, after) = ranks.verdict(rank, since);
            assert!(verdict.error.contains("rank 2 came and was lost"), "{}", verdict.error);
            assert!(after < Duration::from_secs(1), "{after:?}");
        }
    }
}

#[test]
fn the_flight_record_tells_the_last_thousand_operations() {
    let test = "failures::the_flight_record_tells_the_last_thousand_operations";
    let many = |seat: &Seat| {
        let world = seat.join()?;
        for _ in 0..1500 {
            world.all_reduce(&mut [1.0f32; 10], Op::Sum)?;
        }
        if seat.rank() == 1 {
            world.abort("enough");
        }
        world.all_reduce(&mut [1.0f32; 10], Op::Sum)
    };
    let Some(mut ranks) = spawn(test, "shm", shared_memory(2), impatient(), many) else { return };
    let _ = ranks.verdict(0, SystemTime::now());
    let bytes = std::fs::read(ranks.folder.join("flight-rank-0.json")).expect("it was written");
    let record: serde_json::Value = serde_json::from_slice(&bytes).expect("it is JSON");
    assert_eq!(record["guilty"], 1);
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
