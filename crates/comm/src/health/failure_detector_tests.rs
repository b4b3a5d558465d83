//! The failure detector on a simulated network with random delays: ranks are killed, stopped or abort at
//! random times, and every survivor must find the rank that failed.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const HEARTBEAT: u64 = 5_000;
const BEAT: u64 = 500;
const MAX_DELAY: u64 = 40;

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The process ends; its connections close.
    Killed,
    /// The process stops; its connections stay open.
    Stopped,
    /// The rank raises an alarm.
    Aborts,
    /// The rank says goodbye and closes its connections.
    Leaves,
}

struct Net {
    detectors: Vec<FailureDetector>,
    running: Vec<bool>,
    raised: Vec<Option<Failure>>,
    /// Messages in flight: (arrival time, number) → (to, event).
    in_flight: BTreeMap<(u64, u64), (usize, Event)>,
    sent: u64,
    /// Messages on one connection arrive in order.
    last_arrival: BTreeMap<(usize, usize), u64>,
    seed: u64,
}

impl Net {
    fn new(ranks: usize, seed: u64) -> Net {
        let name = |r: usize| (r, format!("rank {r}"));
        let detector = |me: usize| {
            let peers = if me == 0 { (1..ranks).map(name).collect() } else { vec![name(0)] };
            FailureDetector::new(me, peers, HEARTBEAT, true, 0)
        };
        Net {
            detectors: (0..ranks).map(detector).collect(),
            running: vec![true; ranks],
            raised: vec![None; ranks],
            in_flight: BTreeMap::new(),
            sent: 0,
            last_arrival: BTreeMap::new(),
            seed,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.seed >> 33) % below
    }

    fn send(&mut self, now: u64, from: usize, to: usize, event: Event) {
        let earliest = self.last_arrival.get(&(from, to)).copied().unwrap_or(0);
        let at = (now + 1 + self.random(MAX_DELAY)).max(earliest);
        self.last_arrival.insert((from, to), at);
        self.sent += 1;
        self.in_flight.insert((at, self.sent), (to, event));
    }

    fn handle(&mut self, now: u64, rank: usize, event: Event) {
        if !self.running[rank] {
            return;
        }
        let own = RankReport { state: RankState::Running, calls: vec![] };
        for action in self.detectors[rank].on(event, &own, now) {
            match action {
                Action::Raise(failure) => {
                    self.raised[rank].get_or_insert(failure);
                }
                Action::Send(to, message) => {
                    self.send(now, rank, to, Event::Received(rank, message));
                }
                Action::Mirror(..) => {}
            }
        }
    }

    fn close(&mut self, now: u64, rank: usize) {
        self.running[rank] = false;
        let peers: Vec<usize> = self.detectors[rank].peers.iter().map(|p| p.rank).collect();
        for peer in peers {
            self.send(now, rank, peer, Event::Closed(rank));
        }
    }

    fn inject(&mut self, now: u64, rank: usize, fault: Fault) {
        match fault {
            Fault::Killed => self.close(now, rank),
            Fault::Stopped => self.running[rank] = false,
            Fault::Aborts => {
                let text = format!("rank {rank} aborted");
                let failure = Failure { culprit: rank, cause: Cause::Failed, text };
                self.handle(now, rank, Event::Alarm(failure));
                self.close(now, rank);
            }
            Fault::Leaves => {
                let peers: Vec<usize> = self.detectors[rank].peers.iter().map(|p| p.rank).collect();
                for peer in peers {
                    self.send(now, rank, peer, Event::Received(rank, ControlMessage::Goodbye));
                }
                self.close(now, rank);
            }
        }
    }

    /// Runs until `end`, with `fault` injected into `victim` at `when`.
    fn run(&mut self, end: u64, victim: usize, when: u64, fault: Fault) {
        for now in 0..end {
            if now == when {
                self.inject(now, victim, fault);
            }
            while let Some(entry) = self.in_flight.first_entry().filter(|e| e.key().0 <= now) {
                let (to, event) = entry.remove();
                self.handle(now, to, event);
            }
            if now % BEAT == 0 {
                for rank in 0..self.detectors.len() {
                    self.handle(now, rank, Event::Tick);
                }
            }
        }
    }
}

struct Case {
    ranks: usize,
    seed: u64,
    victim: usize,
    when: u64,
    fault: Fault,
}

/// Asserts that all survivors blame the victim `within` the given time after the fault.
fn assert_survivors_blame_victim(case: Case, within: u64) {
    let Case { ranks, seed, victim, when, fault } = case;
    let mut net = Net::new(ranks, seed);
    net.run(when + within, victim, when, fault);
    for rank in (0..ranks).filter(|r| *r != victim) {
        let failure = net.raised[rank].as_ref();
        let culprit = failure.map(|f| f.culprit);
        assert_eq!(
            culprit,
            Some(victim),
            "rank {rank} of {ranks}, {fault:?} at {when}: {failure:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_survivors_learn_of_a_death_or_an_abort_immediately(
        ranks in 2usize..9, seed: u64, victim in 0usize..8, when in 0u64..3000, aborts: bool,
    ) {
        let fault = if aborts { Fault::Aborts } else { Fault::Killed };
        let case = Case { ranks, seed, victim: victim % ranks, when, fault };
        assert_survivors_blame_victim(case, 3 * MAX_DELAY);
    }

    #[test]
    fn all_survivors_learn_of_a_stopped_rank_within_the_heartbeat_timeout(
        ranks in 2usize..9, seed: u64, victim in 0usize..8, when in 0u64..3000,
    ) {
        let within = HEARTBEAT + 2 * BEAT + 3 * MAX_DELAY;
        let case = Case { ranks, seed, victim: victim % ranks, when, fault: Fault::Stopped };
        assert_survivors_blame_victim(case, within);
    }

    #[test]
    fn no_false_alarms(ranks in 2usize..9, seed: u64, victim in 1usize..8, when in 0u64..3000) {
        let mut net = Net::new(ranks, seed);
        // Rank 0 stays until all have left; any other may leave when it likes.
        let victim = 1 + victim % (ranks - 1).max(1);
        net.run(when + 3 * HEARTBEAT, victim.min(ranks - 1), when, Fault::Leaves);
        prop_assert!(net.raised.iter().all(|r| r.is_none()), "{:?}", net.raised);
    }
}
