//! Invariants of the lists of every schedule, over many sizes, and the errors of invalid lists.

use lockstep_plan::schedule::{
    Act, Action, InFlight, Schedule, ScheduleKind, Times, clock, replay,
};
use proptest::prelude::*;
use std::collections::HashSet;

/// All schedules of up to 8 ranks, 4 chunks and 32 micro-batches.
pub fn all() -> impl Iterator<Item = Schedule> {
    let sizes = (1..=8).flat_map(|ranks| (1..=4).map(move |chunks| (ranks, chunks)));
    let sizes = sizes.flat_map(|(r, c)| (1..=32).map(move |micros| (r, c, micros)));
    ScheduleKind::ALL.into_iter().flat_map(move |kind| {
        sizes.clone().filter_map(move |(r, c, m)| Schedule::new(kind, r, c, m).ok())
    })
}

/// The first line of a schedule as text, which names it in messages.
fn name(schedule: &Schedule) -> String {
    schedule.to_string().lines().next().unwrap().to_string()
}

#[test]
fn every_size_that_can_be_is_there() {
    let count = |kind| all().filter(|schedule| schedule.kind == kind).count();
    for kind in [
        ScheduleKind::Gpipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbH2,
    ] {
        assert_eq!(count(kind), 8 * 32, "{kind}");
    }
    let multiples: usize = (1..=8).map(|ranks| 32 / ranks).sum();
    assert_eq!(count(ScheduleKind::Interleaved), 4 * multiples);
}

#[test]
fn every_schedule_does_its_work_and_ends() {
    for schedule in all() {
        assert_eq!(schedule.check(), Ok(()), "{schedule}");
        replay(&schedule, None).unwrap_or_else(|e| panic!("{e}\n{schedule}"));
    }
}

/// All schedules sum gradients in the same order, and messages between two stages need no tags.
#[test]
fn every_stage_takes_micro_batches_in_order() {
    for schedule in all() {
        for list in &schedule.actions {
            let mut sorted = list.clone();
            sorted.sort();
            let mut by_stage_and_act = list.clone();
            by_stage_and_act.sort_by_key(|action| (action.stage, action.act));
            assert_eq!(by_stage_and_act, sorted, "{schedule}");
        }
    }
}

#[test]
fn activations_held() {
    for schedule in all() {
        let Schedule { kind, ranks, chunks, micros, .. } = schedule;
        for rank in 0..ranks {
            let (inputs, weights) = match kind {
                ScheduleKind::Gpipe => (micros, micros),
                ScheduleKind::OneForwardOneBackward => (ranks - rank, ranks - rank),
                ScheduleKind::Interleaved => {
                    let turns = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1;
                    (turns, turns)
                }
                ScheduleKind::ZbH1 => (ranks - rank, ranks),
                ScheduleKind::ZbH2 => (2 * (ranks - rank) - 1, 2 * ranks - 1),
            };
            let most = micros * chunks;
            let expected =
                InFlight { until_input: inputs.min(most), until_weights: weights.min(most) };
            assert_eq!(schedule.in_flight(rank), expected, "rank {rank} of {}", name(&schedule));
        }
    }
}

/// A queue of one message between stages is enough for all schedules. Without a queue, schedules that alternate deadlock:
/// two neighbors wait for each other to receive.
#[test]
fn room_that_links_need() {
    for schedule in all() {
        let Schedule { kind, ranks, micros, .. } = schedule;
        let without = kind == ScheduleKind::Gpipe || ranks == 1 || micros == 1;
        assert_eq!(replay(&schedule, Some(0)).is_ok(), without, "{}", name(&schedule));
        replay(&schedule, Some(1)).unwrap_or_else(|e| panic!("{e}\n{schedule}"));
    }
}

#[test]
fn what_cannot_be() {
    #[rustfmt::skip]
    let cases = [
        (ScheduleKind::Interleaved, 4, 2, 6, "interleaved takes micro-batches in rounds of ranks=4, which does not divide micros=6; try 4 or 8"),
        (ScheduleKind::Interleaved, 4, 2, 3, "interleaved takes micro-batches in rounds of ranks=4, which does not divide micros=3; try 4"),
        (ScheduleKind::OneForwardOneBackward, 4, 2, 8, "1f1b has one stage per rank, not chunks=2; try chunks=1, or interleaved"),
        (ScheduleKind::ZbH2, 4, 3, 8, "zb-h2 has one stage per rank, not chunks=3; try chunks=1, or interleaved"),
        (ScheduleKind::Gpipe, 0, 1, 8, "gpipe with ranks=0 does nothing; ranks must be at least 1"),
        (ScheduleKind::Gpipe, 1, 0, 8, "gpipe with chunks=0 does nothing; chunks must be at least 1"),
        (ScheduleKind::ZbH1, 1, 1, 0, "zb-h1 with micros=0 does nothing; micros must be at least 1"),
    ];
    for (kind, ranks, chunks, micros, said) in cases {
        assert_eq!(Schedule::new(kind, ranks, chunks, micros), Err(said.to_string()));
    }
}

#[test]
fn what_check_says() {
    #[rustfmt::skip]
    let cases: [(&str, &[&str]); 8] = [
        ("1f1b ranks=1 chunks=1 micros=1\n0F0 0B0", &[]),
        ("1f1b ranks=1 chunks=1 micros=1\n0B0 0F0", &["rank 0 runs 0B0 before 0F0"]),
        ("1f1b ranks=1 chunks=1 micros=2\n0F0 0B0 0F0", &["0F0 runs 2 times", "0F1 never runs", "0B1 never runs"]),
        ("1f1b ranks=1 chunks=1 micros=1\n0F0 0B0 0W0", &["rank 0 runs 0W0 as Weights, which 1f1b does not have", "rank 0 runs 0W0 before 0B0"]),
        ("zb-h1 ranks=1 chunks=1 micros=1\n0F0 0W0 0B0", &["rank 0 runs 0W0 before 0B0"]),
        ("zb-h1 ranks=1 chunks=1 micros=1\n0F0 0B0", &["0W0 never runs"]),
        ("1f1b ranks=1 chunks=1 micros=1\n0F0 0B0 1F0 0F1", &["rank 0 runs 1F0, but there are 1 stages", "rank 0 runs 0F1, but there are 1 micro-batches"]),
        ("gpipe ranks=2 chunks=1 micros=1\n1F0 1B0\n0F0 0B0", &[
            "rank 0 runs 1F0, whose stage is on rank 1", "rank 0 runs 1B0, whose stage is on rank 1",
            "rank 1 runs 0F0, whose stage is on rank 0", "rank 1 runs 0B0, whose stage is on rank 0",
        ]),
    ];
    for (text, said) in cases {
        let schedule: Schedule = text.parse().unwrap();
        let wrong = schedule.check().err().unwrap_or_default();
        assert_eq!(wrong, said, "{text}");
    }
    // A list that asks for more memory than exists.
    let owing: Schedule = "1f1b ranks=1 chunks=1 micros=1000000000000\n0F0".parse().unwrap();
    assert_eq!(owing.check().unwrap_err().len(), 100);
}

#[test]
fn who_waits_for_whom() {
    #[rustfmt::skip]
    let cases = [
        // Each rank waits for a message of the other.
        ("gpipe ranks=2 chunks=1 micros=2\n0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", None,
            "rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0"),
        ("gpipe ranks=3 chunks=1 micros=1\n0F0 0B0\n1F0 1B0\n2B0 2F0", None,
            "rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1B0 for 2B0 of rank 2, which waits at 2B0 for 2F0 of its own"),
        ("gpipe ranks=2 chunks=1 micros=1\n0F0 0B0\n1F0", None,
            "rank 0 waits at 0B0 for 1B0 of rank 1, which has finished"),
        // Both ranks send, and none receives.
        ("1f1b ranks=2 chunks=1 micros=2\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", Some(0),
            "rank 0 waits to send 0F1 until 1F1 of rank 1 takes it, which waits to send 1B0 until 0B0 of rank 0 takes it"),
    ];
    for (text, depth, said) in cases {
        let schedule: Schedule = text.parse().unwrap();
        assert_eq!(replay(&schedule, depth).unwrap_err().to_string(), said, "{text}");
    }
}

fn any_schedule() -> impl Strategy<Value = Schedule> {
    (0..5_usize, 1..=5_usize, 1..=3_usize, 1..=6_usize).prop_map(|(kind, ranks, chunks, rounds)| {
        let kind = ScheduleKind::ALL[kind];
        let (chunks, micros) =
            if kind == ScheduleKind::Interleaved { (chunks, rounds * ranks) } else { (1, rounds) };
        Schedule::new(kind, ranks, chunks, micros).unwrap()
    })
}

proptest! {
    /// Lists with two actions swapped: either both the replay and the clock accept them, and every action runs after its
    /// inputs, or both reject them. A longer queue never causes a deadlock.
    #[test]
    fn replay_and_clock_agree(
        mut schedule in any_schedule(),
        swaps in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..4),
    ) {
        for (rank, a, b) in swaps {
            let list = &mut schedule.actions[rank.index(schedule.ranks)];
            let (a, b) = (a.index(list.len()), b.index(list.len()));
            list.swap(a, b);
        }
        let ends = replay(&schedule, None);
        match clock(&schedule, &Times { send: 0.5, ..Times::EVEN }) {
            Err(deadlock) => prop_assert_eq!(Err(deadlock), ends),
            Ok(timeline) => {
                prop_assert_eq!(ends, Ok(()));
                prop_assert_eq!(schedule.check(), Ok(()));
                let spans: Vec<_> = timeline.ranks.iter().flatten().collect();
                let end = |of: Action| spans.iter().find(|span| span.action == of).unwrap().end;
                for span in &spans {
                    let needs = [span.action.follows(), span.action.takes_from(schedule.stages())];
                    for need in needs.into_iter().flatten() {
                        prop_assert!(end(need) <= span.start, "{} after {need}", span.action);
                    }
                }
            }
        }
        let mut ended = false;
        for depth in 0..8 {
            let ends = replay(&schedule, Some(depth)).is_ok();
            prop_assert!(ends || !ended, "ends with less room than {depth}");
            ended = ends;
        }
        prop_assert!(!ended || replay(&schedule, None).is_ok());
    }

    /// A schedule with a missing action is rejected.
    #[test]
    fn nothing_can_be_left_out(mut schedule in any_schedule(), rank: prop::sample::Index, at: prop::sample::Index) {
        let list = &mut schedule.actions[rank.index(schedule.ranks)];
        let lost = list.remove(at.index(list.len()));
        let wrong = schedule.check().unwrap_err();
        prop_assert!(wrong.contains(&format!("{lost} never runs")), "{wrong:?}");
        // Other actions wait for it, unless it computes weight gradients or the gradient of the first stage's input.
        if lost.act == Act::Forward || lost.act != Act::Weights && lost.stage > 0 {
            prop_assert!(replay(&schedule, None).is_err());
        }
    }
}

/// The list of a rank says which of its messages have been received. Here the others are as late as they can be.
#[test]
fn messages_are_not_called_received_before_they_are() {
    let sizes = [1, 2, 3, 5, 8, 16];
    for schedule in all().filter(|s| s.ranks <= 5 && sizes.contains(&s.micros)) {
        let lists: Vec<_> = (0..schedule.ranks).map(|rank| schedule.steps(rank)).collect();
        for rank in 0..schedule.ranks {
            let listed = schedule.received(rank);
            let (mut sent, mut arrived) = (HashSet::new(), HashSet::new());
            let mut done = vec![0; schedule.ranks];
            // The rank itself runs if it can, otherwise the one that it is waiting for, and so on.
            while done[rank] < lists[rank].len() {
                let mut next = rank;
                let step = loop {
                    let step = &lists[next][done[next]];
                    let missing = step.receives.iter().find(|m| !sent.contains(&m.result_of));
                    match missing {
                        Some(message) => next = message.from,
                        None => break step,
                    }
                };
                arrived.extend(step.receives.iter().map(|message| message.result_of));
                if next == rank {
                    for action in &listed[done[rank]] {
                        assert!(arrived.contains(action), "{action} of rank {rank}: {schedule}");
                    }
                }
                if step.sends_to.is_some() {
                    sent.insert(step.action);
                }
                done[next] += 1;
            }
            let mut all: Vec<_> = listed.concat();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), listed.concat().len(), "listed twice: {schedule}");
        }
    }
}

/// Memory of messages that are known to have been received can be used again: the others do not grow in number with the
/// micro-batches.
#[test]
fn few_messages_are_not_known_to_be_received() {
    let most = |kind, ranks, micros| {
        let schedule = Schedule::new(kind, ranks, 1, micros).unwrap();
        let of_rank = |rank| {
            let (mut waiting, mut most) = (0, 0);
            for (step, received) in schedule.steps(rank).iter().zip(schedule.received(rank)) {
                waiting = waiting + usize::from(step.sends_to.is_some()) - received.len();
                most = most.max(waiting);
            }
            most
        };
        (0..ranks).map(of_rank).max().unwrap()
    };
    for kind in [ScheduleKind::OneForwardOneBackward, ScheduleKind::ZbH1, ScheduleKind::ZbH2] {
        for ranks in [2, 4, 8] {
            let [few, many] = [16, 64].map(|micros| most(kind, ranks, micros));
            assert!(many <= few.max(2 * ranks), "{kind} on {ranks}: {few}, {many}");
        }
    }
    // GPipe sends all activations before the first gradient comes back.
    assert_eq!(most(ScheduleKind::Gpipe, 2, 16), 16);
}
