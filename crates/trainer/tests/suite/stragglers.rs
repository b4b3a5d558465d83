//! A rank that keeps the others waiting is named by all of them.

use std::time::{Duration, Instant};

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_trainer::straggler::{Times, expected_work};
use lockstep_trainer::{Rank, Slow, StragglerMonitor};

use crate::plans::{plan, source};

/// Steps in which one rank sleeps before it computes: whom each rank names at each report.
fn named(
    ranks: usize,
    sets: &[&str],
    slow: usize,
    sleeps: impl Fn(u64) -> bool + Sync,
) -> Vec<Vec<Option<usize>>> {
    let (plan, source) = (plan(ranks, sets), source());
    on_threads(ranks, |world| {
        let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
        let mut lookout = StragglerMonitor::new(&plan, &world).unwrap();
        let look = |step: u64| {
            let begun = Instant::now();
            if world.rank() == slow && sleeps(step) {
                std::thread::sleep(Duration::from_millis(150));
            }
            let stepped = rank.step(&source, step).unwrap();
            let waiting = stepped.exchange.as_secs_f64();
            let computing = begun.elapsed().as_secs_f64() - waiting;
            let reading = stepped.reading.as_secs_f64();
            let times = Times { computing, waiting, reading };
            let view = lookout.look(&rank, times, u64::from(step > 1)).unwrap();
            match view.slow {
                Some(Slow::Rank(straggler, _)) => {
                    assert!(straggler.computing > straggler.others && straggler.waited > 0.1);
                    Some(straggler.rank)
                }
                _ => None,
            }
        };
        (1..=8).map(look).collect()
    })
}

#[test]
fn a_rank_that_is_slow_in_every_step_is_named_by_all() {
    for (ranks, sets) in [
        (2, vec![]),
        (3, vec!["layout.zero=2"]),
        (2, vec!["layout.tensor=2"]),
        (4, vec!["layout.data=2", "layout.pipe=2"]),
        (2, vec!["layout.context=2"]),
        (2, vec!["layout.pipe=2"]),
    ] {
        let slow = ranks - 1;
        for told in named(ranks, &sets, slow, |_| true) {
            assert_eq!(told[..3], [None; 3], "{sets:?}: too early to tell");
            assert_eq!(told[4..], [Some(slow); 4], "{sets:?}");
        }
    }
}

#[test]
fn one_bad_step_is_no_straggler() {
    for told in named(3, &[], 1, |step| step == 5) {
        assert!(!told.contains(&Some(1)), "{told:?}");
    }
}

/// The last stage has the head to compute: more work, and so more time.
#[test]
fn stages_are_compared_by_their_work() {
    let all = expected_work(&plan(4, &["layout.data=2", "layout.pipe=2"]));
    assert_eq!(all.iter().map(|work| work.kind).collect::<Vec<_>>(), [0, 0, 1, 1]);
    assert!(all[0].flops < all[2].flops && all[2].flops == all[3].flops);
    let whole = expected_work(&plan(1, &[]))[0].flops;
    assert!(((all[0].flops + all[2].flops) / whole - 1.0).abs() < 1e-9);
}
