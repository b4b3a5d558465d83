//! Work on rank zero may take longer than the timeout of a collective, and its outcome reaches all ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::sleep;
use std::time::Duration;

use lockstep_comm::{Options, World, on_threads_with};
use lockstep_trainer::{Error, on_rank_zero};

const TIMEOUT: Duration = Duration::from_secs(5);
const LONGER: Duration = Duration::from_secs(7);

/// Ranks whose collectives fail after `TIMEOUT`.
fn with_timeout<R: Send>(ranks: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    let options = Options { timeout: TIMEOUT, ..Options::default() };
    on_threads_with(&options, ranks, rank)
}

#[test]
fn work_may_take_longer_than_the_timeout() {
    for (ranks, time) in [(1, Duration::ZERO), (2, Duration::ZERO), (5, LONGER)] {
        let results = with_timeout(ranks, |world| {
            let work = || {
                sleep(time);
                Ok::<_, Error>("saved")
            };
            let result = on_rank_zero(&world, work).unwrap();
            world.barrier().unwrap();
            result
        });
        assert_eq!(results[0], Some("saved"));
        assert_eq!(results[1..], vec![None; ranks - 1], "only rank zero has the result");
    }
}

#[test]
fn an_error_of_the_work_reaches_all_ranks() {
    for time in [Duration::ZERO, LONGER] {
        let errors = with_timeout(3, |world| {
            let work = || {
                sleep(time);
                Err::<(), _>(Error::Invalid("no space for step 7".into()))
            };
            let error = on_rank_zero(&world, work).unwrap_err();
            // Collectives still work.
            world.barrier().unwrap();
            error
        });
        assert!(
            matches!(&errors[0], Error::Invalid(_)),
            "rank zero returns its own error: {}",
            errors[0]
        );
        for error in &errors[1..] {
            assert_eq!(error.to_string(), "rank 0: no space for step 7");
        }
    }
}

#[test]
fn a_panic_of_the_work_ends_the_wait_of_the_others() {
    let results = with_timeout(2, |world| {
        let rank = world.rank();
        // The world is moved into the closure, so that the panic drops it as a failing rank would.
        let result = catch_unwind(AssertUnwindSafe(move || {
            on_rank_zero(&world, || -> Result<(), Error> { panic!("the work panics") })
        }));
        (rank, result.map_err(|_| ()))
    });
    assert!(results[0].1.is_err(), "the panic is propagated");
    assert!(matches!(results[1].1, Ok(Err(Error::Comm(_)))), "the other rank gets an error");
}

#[test]
fn a_rank_that_leaves_during_the_work_is_an_error() {
    let results = with_timeout(2, |world| match world.rank() {
        0 => Some(on_rank_zero(&world, || {
            sleep(Duration::from_secs(2));
            Ok::<_, Error>(())
        })),
        _ => None,
    });
    assert!(matches!(results[0], Some(Err(Error::Comm(_)))), "{:?}", results[0]);
}
