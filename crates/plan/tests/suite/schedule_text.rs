//! Schedules as text and JSON, and back.

use crate::schedule_lists::all;
use lockstep_plan::schedule::{Action, Schedule, ScheduleKind, Times, clock, clock_with, replay};
use proptest::prelude::*;

/// To the letter, small enough to follow by hand.
#[test]
fn lists_to_the_letter() {
    #[rustfmt::skip]
    let cases = [
        (ScheduleKind::Gpipe, 2, 1, 3, "\
gpipe ranks=2 chunks=1 micros=3
0F0 0F1 0F2 0B0 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2
"),
        (ScheduleKind::OneForwardOneBackward, 3, 1, 4, "\
1f1b ranks=3 chunks=1 micros=4
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"),
        // Fewer micro-batches than ranks: the warm-up is cut short.
        (ScheduleKind::OneForwardOneBackward, 3, 1, 1, "\
1f1b ranks=3 chunks=1 micros=1
0F0 0B0
1F0 1B0
2F0 2B0
"),
        (ScheduleKind::Interleaved, 2, 2, 4, "\
interleaved ranks=2 chunks=2 micros=4
0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"),
        (ScheduleKind::ZbH1, 3, 1, 4, "\
zb-h1 ranks=3 chunks=1 micros=4
0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
"),
        (ScheduleKind::ZbH2, 2, 1, 4, "\
zb-h2 ranks=2 chunks=1 micros=4
0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3
"),
    ];
    for (kind, ranks, chunks, micros, text) in cases {
        assert_eq!(Schedule::new(kind, ranks, chunks, micros).unwrap().to_string(), text);
    }
}

#[test]
fn text_and_json_come_back() {
    for schedule in all().filter(|schedule| schedule.micros % 3 != 1) {
        assert_eq!(schedule.to_string().parse(), Ok(schedule.clone()));
        let json = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<Schedule>(&json).unwrap(), schedule);
    }
    // A rank without actions is an empty line, the last one too.
    let text = "gpipe ranks=2 chunks=1 micros=1\n0F0 0B0\n\n";
    assert_eq!(text.parse::<Schedule>().unwrap().to_string(), text);
    let small = Schedule::new(ScheduleKind::ZbH1, 2, 1, 1).unwrap();
    let json = r#"{"kind":"zb-h1","ranks":2,"chunks":1,"micros":1,"actions":["0F0 0B0 0W0","1F0 1B0 1W0"]}"#;
    assert_eq!(serde_json::to_string(&small).unwrap(), json);
}

#[test]
fn what_cannot_be_read() {
    #[rustfmt::skip]
    let cases = [
        ("", "line 1: `` is not like `1f1b ranks=4 chunks=1 micros=8`"),
        ("1f1b ranks=1 chunks=1", "line 1: `1f1b ranks=1 chunks=1` is not like `1f1b ranks=4 chunks=1 micros=8`"),
        ("1b1f ranks=1 chunks=1 micros=1\n0F0", "line 1: unknown schedule `1b1f`; use one of gpipe, 1f1b, interleaved, zb-h1, zb-h2"),
        ("1f1b ranks=2 chunks=1 micros=1\n0F0 0B0", "1 lines of actions for ranks=2; there must be one per rank"),
        ("1f1b ranks=0 chunks=1 micros=1", "0 lines of actions for ranks=0; there must be one per rank"),
        ("1f1b ranks=2 chunks=1 micros=1\n0F0 0B0\n1F0 1X0", "rank 1: `1X0` is not like 2F0: a stage, F, B or W, and a micro-batch"),
        ("1f1b ranks=1 chunks=1 micros=1\n0F+1", "rank 0: `0F+1` is not like 2F0: a stage, F, B or W, and a micro-batch"),
        ("1f1b ranks=1 chunks=1 micros=1\n0F", "rank 0: `0F` is not like 2F0: a stage, F, B or W, and a micro-batch"),
        ("1f1b ranks=1 chunks=9999999999 micros=9999999999\n0F0", "chunks=9999999999, micros=9999999999 are more than can be meant"),
    ];
    for (text, said) in cases {
        assert_eq!(text.parse::<Schedule>(), Err(said.to_string()), "{text}");
    }
    let json = r#"{"kind":"1f1b","ranks":1,"chunks":1,"micros":1,"actions":["0F0 B0"]}"#;
    let said = serde_json::from_str::<Schedule>(json).unwrap_err().to_string();
    assert_eq!(said, "rank 0: `B0` is not like 2F0: a stage, F, B or W, and a micro-batch");
}

#[test]
fn pictures() {
    let times = Times::EVEN;
    let drawn = |kind, ranks, chunks, micros| {
        clock(&Schedule::new(kind, ranks, chunks, micros).unwrap(), &times).unwrap().draw(1.0)
    };
    let zb_h2 = "\
rank 0  F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 ...
rank 1  ...F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
";
    assert_eq!(drawn(ScheduleKind::ZbH2, 2, 1, 4), zb_h2);
    let interleaved = "\
rank 0  0F0 0F1 2F0 2F1 ........2B0     ....2B1     0B0     0B1
rank 1  ....1F0 1F1 3F0 3B0     3F1 3B1     1B0     1B1     ........
";
    assert_eq!(drawn(ScheduleKind::Interleaved, 2, 2, 2), interleaved);
    // A slow last stage, in cells of half a unit.
    let schedule = Schedule::new(ScheduleKind::Gpipe, 2, 1, 2).unwrap();
    let lasts = |action: Action| [0.5, 1.0][action.stage];
    let slow = "\
rank 0  F0 F1 ...........................B0 ...B1
rank 1  .........F0    F1    B0    B1    .........
";
    assert_eq!(clock_with(&schedule, lasts, 1.0).unwrap().draw(0.5), slow);
}

proptest! {
    /// Whatever is typed, reading, checking, replaying and timing it end without a panic.
    #[test]
    fn no_text_does_harm(text in "(1f1b|zb-h2) ranks=[1-3] chunks=[0-2] micros=[0-9]{1,3}\n(([0-9]{1,2}|18446744073709551615)[FBW][0-3] ?){0,8}\n([0-5][FBW][0-3] ){0,8}") {
        if let Ok(schedule) = text.parse::<Schedule>() {
            let _ = (schedule.check(), replay(&schedule, Some(1)), schedule.in_flight(0));
            prop_assert_eq!(replay(&schedule, None).is_ok(), clock(&schedule, &Times::EVEN).is_ok());
            prop_assert_eq!(schedule.to_string().parse::<Schedule>(), Ok(schedule));
        }
    }
}

/// A cell may be longer than a pass: the drawing is stretched, and no pass is overwritten by the next one.
#[test]
fn a_coarse_drawing_omits_no_pass() {
    for schedule in
        all().filter(|schedule| (2..=4).contains(&schedule.ranks) && schedule.micros < 9)
    {
        let lasts = |action: Action| 1.0 + (action.stage % 3) as f64 / 7.0;
        let timeline = clock_with(&schedule, lasts, 0.1).unwrap();
        for unit in [0.5, 2.0, 1e9] {
            let drawn = timeline.draw(unit);
            for (rank, row) in drawn.lines().enumerate() {
                let passes = row.split([' ', '.']).filter(|word| !word.is_empty()).skip(2);
                let wanted = schedule.actions[rank].iter().map(|action| match schedule.chunks {
                    1 => format!("{}{}", action.act.letter(), action.micro),
                    _ => action.to_string(),
                });
                assert!(passes.eq(wanted), "{:?} unit {unit}\n{drawn}", schedule.kind);
            }
        }
    }
}
