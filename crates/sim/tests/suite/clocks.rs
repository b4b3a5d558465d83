//! The fast clock compared with the clock of `plan` and with the bubble rates of the zero-bubble paper.

use crate::tables::read;
use lockstep_plan::schedule::{Act, Action, Schedule, ScheduleKind, clock_with};
use lockstep_sim::clock::{PassTimes, finish_times, walk};

/// Stages with different durations.
fn uneven(stages: usize, send: f64) -> PassTimes {
    let length = |stage: usize, scale: f64| scale * (1.0 + 0.1 * ((7 * stage + 3) % 5) as f64);
    PassTimes {
        forward: (0..stages).map(|stage| length(stage, 1.0)).collect(),
        input: (0..stages).map(|stage| length(stage + 1, 1.2)).collect(),
        weights: (0..stages).map(|stage| length(stage + 2, 0.8)).collect(),
        send,
    }
}

fn kinds() -> [(ScheduleKind, usize); 5] {
    [
        (ScheduleKind::Gpipe, 1),
        (ScheduleKind::OneForwardOneBackward, 1),
        (ScheduleKind::Interleaved, 2),
        (ScheduleKind::ZbH1, 1),
        (ScheduleKind::ZbH2, 1),
    ]
}

#[test]
fn every_schedule_matches_the_clock_of_plan() {
    for (kind, chunks) in kinds() {
        for ranks in 1..=5 {
            for rounds in 1..=4 {
                let schedule = Schedule::new(kind, ranks, chunks, ranks * rounds).unwrap();
                let passes = uneven(ranks * chunks, 0.3);
                let length = |action: Action| match action.act {
                    Act::Forward => passes.forward[action.stage],
                    Act::Backward => passes.input[action.stage] + passes.weights[action.stage],
                    Act::Input => passes.input[action.stage],
                    Act::Weights => passes.weights[action.stage],
                };
                let slow = clock_with(&schedule, length, 0.3).unwrap();
                let (fast, _) = walk(&schedule, &passes);
                for rank in 0..ranks {
                    let end = slow.ranks[rank].last().unwrap().end;
                    assert!(
                        (fast.last[rank] - end).abs() < 1e-9,
                        "{kind} {ranks}x{chunks} {rounds}"
                    );
                    assert!((fast.busy[rank] - slow.busy(rank)).abs() < 1e-9);
                }
            }
        }
    }
}

/// Extrapolated finish times equal those of the full simulation. With equal stages this holds at once; with stages that
/// differ by up to 40% it takes more rounds.
#[test]
fn long_steps_are_extrapolated() {
    for (kind, chunks) in kinds() {
        for ranks in [1, 2, 3, 4, 8, 16] {
            for send in [0.0, 0.4] {
                let equal = |length: f64| vec![length; ranks * chunks];
                let even =
                    PassTimes { forward: equal(1.0), input: equal(1.1), weights: equal(0.9), send };
                for (passes, close) in [(even, 1e-3), (uneven(ranks * chunks, send), 1e-2)] {
                    let micros = 40 * ranks;
                    let whole =
                        walk(&Schedule::new(kind, ranks, chunks, micros).unwrap(), &passes).0;
                    let short = finish_times(kind, ranks, micros, &passes);
                    let error = short.makespan() / whole.makespan() - 1.0;
                    assert!(error.abs() < close, "{kind} on {ranks}: {error}");
                }
            }
        }
    }
}

/// "Zero Bubble Pipeline Parallelism", Table 5.
#[test]
fn bubble_rates_of_the_zero_bubble_paper() {
    let mut compared = 0;
    for row in read(include_str!("../measured/zero_bubble_tables.csv")) {
        let [ranks, micros, layers] = ["p", "m", "layers"].map(|name| row.count(name));
        let rate = |kind: ScheduleKind, chunks: usize| {
            let part = |name: &str| vec![row.number(name).unwrap() / chunks as f64; ranks * chunks];
            let passes = PassTimes {
                forward: part("TF_ms"),
                input: part("TB_ms"),
                weights: part("TW_ms"),
                send: row.number("Tcomm_ms").unwrap(),
            };
            finish_times(kind, ranks, micros, &passes).bubble_rate()
        };
        let kinds = [
            ("bubble_1F1B", ScheduleKind::OneForwardOneBackward),
            ("bubble_ZBH1", ScheduleKind::ZbH1),
            ("bubble_ZBH2", ScheduleKind::ZbH2),
        ];
        for (column, kind) in kinds {
            let printed = row.number(column).unwrap();
            let predicted = (rate(kind, 1) * 1e4).round() / 1e4;
            assert!((predicted - printed).abs() < 1e-9, "{kind} {predicted} {printed}");
            compared += 1;
        }
        let printed = row.number("bubble_1F1B_I").unwrap();
        let predicted = rate(ScheduleKind::Interleaved, (layers + 2) / ranks);
        assert!((predicted - printed).abs() < 0.004, "interleaved {predicted} {printed}");
    }
    assert_eq!(compared, 36);
}
