//! What one rank does alone may take longer than a deadline, and how it ends is known to all.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::sleep;
use std::time::Duration;

use lockstep_comm::{Options, World, on_threads_with};
use lockstep_trainer::{Error, on_rank_zero};

/// Ranks that give up on each other after a second.
fn impatient<R: Send>(ranks: usize, rank: impl Fn(World) -> R + Sync) -> Vec<R> {
    let options = Options { timeout: Duration::from_secs(1), ..Options::default() };
    on_threads_with(&options, ranks, rank)
}

#[test]
fn work_longer_than_the_deadline_is_waited_for() {
    for ranks in [1, 2, 5] {
        let ends = impatient(ranks, |world| {
            let work = || {
                sleep(Duration::from_secs(3));
                Ok::<_, Error>("saved")
            };
            let end = on_rank_zero(&world, work).unwrap();
            world.barrier().unwrap();
            end
        });
        assert_eq!(ends[0], Some("saved"));
        assert_eq!(ends[1..], vec![None; ranks - 1], "only the first has the result");
    }
}

#[test]
fn the_error_of_the_work_reaches_every_rank() {
    for pause in [0, 2] {
        let errors = impatient(3, |world| {
            let work = || {
                sleep(Duration::from_secs(pause));
                Err::<(), _>(Error::Mistake("no space for step 7".into()))
            };
            let error = on_rank_zero(&world, work).unwrap_err();
            // The ranks are still a world.
            world.barrier().unwrap();
            error
        });
        assert!(matches!(&errors[0], Error::Mistake(_)), "the first has its own: {}", errors[0]);
        for error in &errors[1..] {
            assert_eq!(error.to_string(), "rank 0: no space for step 7");
        }
    }
}

#[test]
fn a_rank_that_panics_alone_ends_the_waiting() {
    let ends = impatient(2, |world| {
        let rank = world.rank();
        // Taken along, so that the panic leaves the world as the end of a rank would.
        let end = catch_unwind(AssertUnwindSafe(move || {
            on_rank_zero(&world, || -> Result<(), Error> { panic!("struck down") })
        }));
        (rank, end.map_err(|_| ()))
    });
    assert!(ends[0].1.is_err(), "the panic is passed on");
    assert!(matches!(ends[1].1, Ok(Err(Error::Comm(_)))), "the other is told");
}

#[test]
fn a_rank_that_leaves_meanwhile_is_noticed() {
    let ends = impatient(2, |world| match world.rank() {
        0 => Some(on_rank_zero(&world, || {
            sleep(Duration::from_secs(2));
            Ok::<_, Error>(())
        })),
        _ => None,
    });
    assert!(matches!(ends[0], Some(Err(Error::Comm(_)))), "{:?}", ends[0]);
}
