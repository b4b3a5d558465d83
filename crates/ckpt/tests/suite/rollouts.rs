//! Every rollout is used exactly once or rejected, in any order of arrival, and also when
//! the learner restarts from its last checkpoint.

use lockstep_ckpt::rollouts::{Ledger, Rollout, Verdict};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

use Verdict::{Accepted, Duplicate, FutureVersion, Stale};

fn rollout(producer: &str, sequence: u64, version: u64) -> Rollout {
    Rollout { producer: producer.into(), sequence, version }
}

/// As stored in a checkpoint.
fn through_json(ledger: &Ledger) -> Ledger {
    serde_json::from_str(&serde_json::to_string(ledger).unwrap()).unwrap()
}

/// Each line: version of the learner on arrival, producer, number, version of the rollout, answer.
#[test]
fn answers() {
    let mut ledger = Ledger::new(2, 4);
    for (at, producer, sequence, version, verdict) in [
        (0, "a", 0, 0, Accepted),
        (0, "a", 0, 0, Duplicate),
        (0, "b", 0, 0, Accepted), // each producer has its own numbers
        (0, "a", 3, 0, Accepted), // out of order
        (0, "a", 3, 0, Duplicate),
        (0, "a", 1, 0, Accepted),
        (0, "a", 2, 1, FutureVersion),
        (1, "a", 2, 1, Duplicate), // an answer is final
        (3, "a", 4, 1, Accepted),  // two versions behind is allowed
        (3, "a", 5, 0, Stale),
        (3, "a", 5, 0, Duplicate),
        (3, "a", 9, 3, Accepted), // the window is 6..10
        (3, "a", 6, 3, Accepted),
        (3, "a", 12, 3, Accepted), // 7 and 8 are no longer accepted
        (3, "a", 8, 3, Stale),
        (3, "a", 8, 3, Duplicate),
        (3, "a", 10, 3, Accepted),
        (3, "a", 7, 3, Stale),
        (3, "a", 1_000_000_000_000, 3, Accepted), // a large gap costs no time or memory
        (3, "a", 11, 3, Stale),
        (3, "a", 12, 3, Duplicate),
        (3, "a", 500_000, 3, Stale),
        (3, "a", 500_000, 3, Duplicate),
    ] {
        while ledger.policy_version() < at {
            ledger.advance();
        }
        let asked = rollout(producer, sequence, version);
        assert_eq!(ledger.accept(&asked), verdict, "{asked:?}");
        assert!(ledger.is_settled(producer, sequence));
        ledger = through_json(&ledger);
    }
    let counts = ledger.counts();
    assert_eq!(
        (counts.accepted, counts.stale, counts.duplicate, counts.future_version),
        (10, 5, 7, 1)
    );
    assert_eq!(ledger.producers().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!((ledger.cursor("b"), ledger.cursor("nobody")), (1, 0));
}

/// A random event.
#[derive(Clone, Debug)]
enum Event {
    /// A producer generates a rollout with its policy and sends it, or it is lost.
    Generated {
        producer: usize,
        arrives: bool,
    },
    /// A producer resends a rollout without a permanent answer.
    Resent {
        producer: usize,
        which: usize,
    },
    /// A producer receives the current policy.
    Published {
        producer: usize,
    },
    /// The learner computes a new policy from the accepted rollouts.
    Updated,
    Saved,
    /// The learner restarts from its last checkpoint.
    Crashed,
}

fn events() -> impl Strategy<Value = Event> {
    let producer = 0..3usize;
    prop_oneof![
        4 => (producer.clone(), any::<bool>()).prop_map(|(producer, arrives)| Event::Generated { producer, arrives }),
        4 => (producer.clone(), any::<usize>()).prop_map(|(producer, which)| Event::Resent { producer, which }),
        1 => producer.prop_map(|producer| Event::Published { producer }),
        2 => Just(Event::Updated),
        1 => Just(Event::Saved),
        1 => Just(Event::Crashed),
    ]
}

/// A learner. Its policy is the list of the rollouts that it has learned from.
#[derive(Clone)]
struct Learner {
    ledger: Ledger,
    learned: Vec<(usize, u64)>,
    refused: Vec<(usize, u64)>,
}

impl Learner {
    fn sees(&mut self, producer: usize, sequence: u64, version: u64) {
        match self.ledger.accept(&rollout(&producer.to_string(), sequence, version)) {
            Accepted => self.learned.push((producer, sequence)),
            Stale | FutureVersion => self.refused.push((producer, sequence)),
            Duplicate => {}
        }
    }
}

/// A producer. It keeps number and version of each rollout until a checkpoint contains its answer.
#[derive(Default)]
struct Keeper {
    version: u64,
    made: u64,
    kept: BTreeMap<u64, u64>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_rollout_is_learned_from_once_or_refused(
        course in prop::collection::vec(events(), 0..200),
        lag in 0..4u64,
    ) {
        // Wider than the whole test, so that every answer belongs to a rollout that arrived.
        let fresh = Ledger::new(lag, 1_000);
        let mut learner = Learner { ledger: fresh, learned: vec![], refused: vec![] };
        let mut saved = learner.clone();
        let mut keepers = [Keeper::default(), Keeper::default(), Keeper::default()];
        for event in course {
            match event {
                Event::Generated { producer, arrives } => {
                    let keeper = &mut keepers[producer];
                    let (sequence, version) = (keeper.made, keeper.version);
                    keeper.made += 1;
                    keeper.kept.insert(sequence, version);
                    if arrives {
                        learner.sees(producer, sequence, version);
                    }
                }
                Event::Resent { producer, which } => {
                    let kept = &keepers[producer].kept;
                    let Some((sequence, version)) = kept.iter().nth(which % kept.len().max(1)) else { continue };
                    learner.sees(producer, *sequence, *version);
                }
                Event::Published { producer } => {
                    keepers[producer].version = learner.ledger.policy_version();
                }
                Event::Updated => drop(learner.ledger.advance()),
                Event::Saved => {
                    saved = Learner { ledger: through_json(&learner.ledger), ..learner.clone() };
                    for (producer, keeper) in keepers.iter_mut().enumerate() {
                        let settled = |sequence| saved.ledger.is_settled(&producer.to_string(), sequence);
                        keeper.kept.retain(|sequence, _| !settled(*sequence));
                    }
                }
                Event::Crashed => learner = saved.clone(),
            }
        }
        // At the end, producers resend all rollouts without an answer.
        for (producer, keeper) in keepers.iter().enumerate() {
            let from = learner.ledger.cursor(&producer.to_string());
            for (sequence, version) in keeper.kept.range(from..) {
                learner.sees(producer, *sequence, *version);
            }
        }

        let made: Vec<(usize, u64)> = keepers
            .iter()
            .enumerate()
            .flat_map(|(producer, keeper)| (0..keeper.made).map(move |sequence| (producer, sequence)))
            .collect();
        let mut answered = [learner.learned.clone(), learner.refused.clone()].concat();
        answered.sort();
        prop_assert_eq!(answered, made, "every rollout has one answer in the history that survived");
        for (producer, keeper) in keepers.iter().enumerate() {
            prop_assert_eq!(learner.ledger.cursor(&producer.to_string()), keeper.made);
        }
    }

    /// The window never grows and no number is accepted twice, in any order of numbers.
    #[test]
    fn a_number_is_accepted_at_most_once(
        numbers in prop::collection::vec(0..60u64, 0..200),
        window in 1..20u64,
    ) {
        let mut ledger = Ledger::new(0, window);
        let (mut accepted, mut seen) = (BTreeSet::new(), BTreeSet::new());
        for sequence in numbers {
            let highest = seen.last().copied();
            let verdict = ledger.accept(&rollout("a", sequence, 0));
            let first = seen.insert(sequence);
            let late = highest.is_some_and(|highest: u64| sequence + window <= highest);
            let expected = match (first, late) {
                (false, _) => Duplicate,
                (true, true) => Stale,
                (true, false) => Accepted,
            };
            prop_assert_eq!(verdict, expected, "{}", sequence);
            prop_assert!(verdict != Accepted || accepted.insert(sequence));
        }
    }
}
