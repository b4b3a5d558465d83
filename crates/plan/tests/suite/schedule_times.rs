//! The clock compared with formulas, and with the bubble rates of the zero-bubble paper.

use crate::schedule_lists::all;
use lockstep_plan::schedule::{Schedule, ScheduleKind, Timeline, Times, clock};

/// Several ratios of halves and integers, whose sums are exact.
fn ratios() -> impl Iterator<Item = Times> {
    let lengths = [0.5, 1.0, 2.0, 3.0];
    lengths.into_iter().flat_map(move |forward| {
        lengths.into_iter().flat_map(move |input| {
            let times = move |weights| Times { forward, input, weights, send: 0.0 };
            lengths.into_iter().map(times)
        })
    })
}

#[test]
fn bubbles_are_as_the_formulas_say() {
    let mut held = 0;
    for schedule in all() {
        // Every size for equal times; for other ratios, one to three micro-batches per rank, and the minimum for which
        // ZB-H2 has a formula.
        let Schedule { ranks, micros, .. } = schedule;
        let some = [ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks].contains(&micros);
        let others = ratios().filter(|_| some);
        for times in others.chain([Times::EVEN]) {
            let Some(formula) = schedule.bubble(&times) else { continue };
            let timeline = clock(&schedule, &times).unwrap();
            let idle = (0..ranks).map(|rank| timeline.idle(rank)).fold(0.0, f64::max);
            assert_eq!(idle, formula, "{times:?} {schedule}");
            held += 1;
        }
    }
    assert!(held > 5_000, "only {held} were looked at");
}

/// The condition of the paper: W is the shortest of the three.
#[test]
fn zero_bubble_as_the_paper_says() {
    for times in ratios().filter(|times| times.weights <= times.forward.min(times.input)) {
        let Times { forward, input, weights, .. } = times;
        for ranks in 1..=8 {
            let bubble = |kind| Schedule::new(kind, ranks, 1, 2 * ranks).unwrap().bubble(&times);
            let gaps = (ranks - 1) as f64;
            assert_eq!(bubble(ScheduleKind::ZbH1), Some(gaps * (forward + input - weights)));
            assert_eq!(bubble(ScheduleKind::ZbH2), Some(gaps * (forward + input - 2.0 * weights)));
        }
    }
}

#[test]
fn formulas_keep_silent_where_they_do_not_hold() {
    let bubble = |kind, micros| Schedule::new(kind, 4, 1, micros).unwrap().bubble(&Times::EVEN);
    assert_eq!(bubble(ScheduleKind::ZbH1, 3), None);
    assert_eq!(bubble(ScheduleKind::ZbH1, 4), Some(3.0));
    assert_eq!(bubble(ScheduleKind::ZbH2, 6), None);
    assert_eq!(bubble(ScheduleKind::ZbH2, 7), Some(0.0));
    assert_eq!(bubble(ScheduleKind::OneForwardOneBackward, 1), Some(9.0));
}

/// With ZB-H2, ranks do not wait between their first and last action, but they do if all ranks synchronize at the end.
#[test]
fn bubble_rate_and_idle_rate() {
    let idle_rate = |timeline: &Timeline| {
        let busy: f64 = (0..4).map(|rank| timeline.busy(rank)).sum();
        1.0 - busy / (4.0 * timeline.makespan())
    };
    let timeline =
        clock(&Schedule::new(ScheduleKind::ZbH2, 4, 1, 8).unwrap(), &Times::EVEN).unwrap();
    assert_eq!((timeline.bubble_rate(), timeline.makespan()), (0.0, 27.0));
    assert!((idle_rate(&timeline) - 3.0 / 27.0).abs() < 1e-12);
    // With 1F1B, both rates are equal.
    let schedule = Schedule::new(ScheduleKind::OneForwardOneBackward, 4, 1, 8).unwrap();
    let timeline = clock(&schedule, &Times::EVEN).unwrap();
    assert!((timeline.bubble_rate() - 9.0 / 33.0).abs() < 1e-12);
    assert!((idle_rate(&timeline) - 9.0 / 33.0).abs() < 1e-12);
}

/// "Zero Bubble Pipeline Parallelism", Table 5: 1F1B, ZB-H1 and ZB-H2 to all four decimals, interleaved to
/// 0.004. In the authors' script for interleaved, only the first micro-batch of each round waits for the message from the
/// last rank to the first, so it ends P sends earlier. Without these sends, all decimals agree.
#[test]
fn bubble_rates_of_the_zero_bubble_paper() {
    let rows = include_str!("../fixtures/zero_bubble_table5.csv");
    let mut compared = 0;
    for row in rows.lines().filter(|line| !line.starts_with('#')).skip(1) {
        let cells: Vec<&str> = row.split(',').collect();
        let count = |at: usize| cells[at].parse::<usize>().unwrap();
        let number = |at: usize| cells[at].parse::<f64>().unwrap();
        let (layers, ranks, micros, send) = (count(1), count(2), count(3), number(7));
        let timeline = |kind, chunks: usize| {
            // The table contains the times of all chunks of a rank.
            let part = |at| number(at) / chunks as f64;
            let times = Times { forward: part(4), input: part(5), weights: part(6), send };
            clock(&Schedule::new(kind, ranks, chunks, micros).unwrap(), &times).unwrap()
        };
        for (at, kind) in [
            (8, ScheduleKind::OneForwardOneBackward),
            (10, ScheduleKind::ZbH1),
            (11, ScheduleKind::ZbH2),
        ] {
            let rate = timeline(kind, 1).bubble_rate();
            assert_eq!(format!("{rate:.4}"), cells[at], "{kind}: {row}");
            compared += 1;
        }
        let interleaved = timeline(ScheduleKind::Interleaved, (layers + 2) / ranks);
        let rate = interleaved.bubble_rate();
        assert!((rate - number(9)).abs() < 0.004, "{rate}: {row}");
        let theirs = 1.0 - interleaved.busy(0) / (interleaved.makespan() - ranks as f64 * send);
        assert_eq!(format!("{theirs:.4}"), cells[9], "interleaved: {row}");
    }
    assert_eq!(compared, 36);
}
