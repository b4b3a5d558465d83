//! Straggler detection with given step times: all ranks name the same straggler.

use lockstep_comm::on_threads;
use lockstep_kernels::Device;
use lockstep_trainer::straggler::{Times, expected_work};
use lockstep_trainer::{Rank, Slow, StragglerMonitor};

use crate::plans::{plan, source};

/// Stragglers that each rank names at each of eight reports. All ranks compute in proportion to their work; one takes
/// four times as long in the steps selected by `is_slow`.
fn named(
    ranks: usize,
    sets: &[&str],
    slow: usize,
    is_slow: impl Fn(u64) -> bool + Sync,
) -> Vec<Vec<Option<usize>>> {
    let plan = plan(ranks, sets);
    let work = expected_work(&plan);
    on_threads(ranks, |world| {
        let rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
        let mut monitor = StragglerMonitor::new(&plan, &world).unwrap();
        let report = |step: u64| {
            let computing = |rank: usize| {
                let slowdown = if rank == slow && is_slow(step) { 4.0 } else { 1.0 };
                slowdown * 0.05 * work[rank].flops / work[0].flops
            };
            let longest = (0..ranks).map(computing).fold(0.0, f64::max);
            let computing = computing(world.rank());
            let times = Times { computing, waiting: longest - computing, ..Times::default() };
            let report = monitor.report(&rank, times, 0, u64::from(step > 1)).unwrap();
            match report.slow {
                Some(Slow::Rank(straggler, _)) => {
                    assert!(straggler.computing > straggler.others && straggler.waited > 0.1);
                    Some(straggler.rank)
                }
                _ => None,
            }
        };
        (1..=8).map(report).collect()
    })
}

/// The measured times of a step are consistent: exposed communication and reading are parts of the step.
#[test]
fn times_of_a_step_add_up() {
    let (plan, source) = (plan(2, &[]), source());
    on_threads(2, |world| {
        let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
        let stepped = rank.step(&source, 1).unwrap();
        assert!(stepped.exposed_comm > std::time::Duration::ZERO);
        assert!(stepped.exposed_comm + stepped.reading <= stepped.time, "{stepped:?}");
    });
}

#[test]
fn a_rank_that_is_slow_in_every_step_is_named_by_all_ranks() {
    for (ranks, sets) in [
        (2, vec![]),
        (3, vec!["layout.zero=2"]),
        (2, vec!["layout.tensor=2"]),
        (4, vec!["layout.data=2", "layout.pipe=2"]),
        (2, vec!["layout.context=2"]),
        (2, vec!["layout.pipe=2"]),
    ] {
        let slow = ranks - 1;
        for reports in named(ranks, &sets, slow, |_| true) {
            assert_eq!(reports[..3], [None; 3], "{sets:?}: too few reports");
            assert_eq!(reports[3..], [Some(slow); 5], "{sets:?}");
        }
    }
}

#[test]
fn one_slow_step_does_not_make_a_straggler() {
    for reports in named(3, &[], 1, |step| step == 5) {
        assert_eq!(reports, [None; 8]);
    }
}

/// The last stage also computes the head.
#[test]
fn expected_work_of_pipeline_stages() {
    let all = expected_work(&plan(4, &["layout.data=2", "layout.pipe=2"]));
    assert_eq!(all.iter().map(|work| work.stage).collect::<Vec<_>>(), [0, 0, 1, 1]);
    assert!(all[0].flops < all[2].flops && all[2].flops == all[3].flops);
    let whole = expected_work(&plan(1, &[]))[0].flops;
    assert!(((all[0].flops + all[2].flops) / whole - 1.0).abs() < 1e-9);
}
