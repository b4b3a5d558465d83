//! The vigil on a simulated network: messages are delayed at random, ranks are killed, stopped or
//! give up at random moments, and whatever happens every survivor must come to know the guilty one.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const HEARTBEAT: u64 = 5_000;
const BEAT: u64 = 500;
const MOST_DELAY: u64 = 40;

#[derive(Clone, Copy, Debug)]
enum Fate {
    /// Gone at once; its connections close.
    Killed,
    /// Silent from now on; its connections stay open.
    Stopped,
    /// Raises an alarm of its own.
    GivesUp,
    /// Says goodbye and closes.
    Leaves,
}

struct Net {
    vigils: Vec<Vigil>,
    running: Vec<bool>,
    raised: Vec<Option<Failure>>,
    /// What arrives when: (time, number) → (to, event).
    mail: BTreeMap<(u64, u64), (usize, Event)>,
    posted: u64,
    /// Connections are in order: nothing overtakes on the same one.
    last_arrival: BTreeMap<(usize, usize), u64>,
    seed: u64,
}

impl Net {
    fn new(ranks: usize, seed: u64) -> Net {
        let name = |r: usize| (r, format!("rank {r}"));
        let vigil = |me: usize| {
            let peers = if me == 0 { (1..ranks).map(name).collect() } else { vec![name(0)] };
            Vigil::new(me, peers, HEARTBEAT, true, 0)
        };
        Net {
            vigils: (0..ranks).map(vigil).collect(),
            running: vec![true; ranks],
            raised: vec![None; ranks],
            mail: BTreeMap::new(),
            posted: 0,
            last_arrival: BTreeMap::new(),
            seed,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.seed >> 33) % below
    }

    fn post(&mut self, now: u64, from: usize, to: usize, event: Event) {
        let earliest = self.last_arrival.get(&(from, to)).copied().unwrap_or(0);
        let at = (now + 1 + self.random(MOST_DELAY)).max(earliest);
        self.last_arrival.insert((from, to), at);
        self.posted += 1;
        self.mail.insert((at, self.posted), (to, event));
    }

    fn happen(&mut self, now: u64, rank: usize, event: Event) {
        if !self.running[rank] {
            return;
        }
        let own = (State::Running, vec![]);
        for act in self.vigils[rank].on(event, &own, now) {
            match act {
                Act::Raise(failure) => {
                    self.raised[rank].get_or_insert(failure);
                }
                Act::Tell(to, word) => self.post(now, rank, to, Event::Heard(rank, word)),
                Act::Mirror(..) => {}
            }
        }
    }

    fn close(&mut self, now: u64, rank: usize) {
        self.running[rank] = false;
        let peers: Vec<usize> = self.vigils[rank].peers.iter().map(|p| p.rank).collect();
        for peer in peers {
            self.post(now, rank, peer, Event::Closed(rank));
        }
    }

    fn meet(&mut self, now: u64, rank: usize, fate: Fate) {
        match fate {
            Fate::Killed => self.close(now, rank),
            Fate::Stopped => self.running[rank] = false,
            Fate::GivesUp => {
                let text = format!("rank {rank} gave up");
                let failure = Failure { guilty: rank, cause: Cause::Failed, text };
                self.happen(now, rank, Event::Alarm(failure));
                self.close(now, rank);
            }
            Fate::Leaves => {
                let peers: Vec<usize> = self.vigils[rank].peers.iter().map(|p| p.rank).collect();
                for peer in peers {
                    self.post(now, rank, peer, Event::Heard(rank, Word::Goodbye));
                }
                self.close(now, rank);
            }
        }
    }

    /// Runs until `end`, with `fate` meeting `victim` at `when`.
    fn run(&mut self, end: u64, victim: usize, when: u64, fate: Fate) {
        for now in 0..end {
            if now == when {
                self.meet(now, victim, fate);
            }
            while let Some(entry) = self.mail.first_entry().filter(|e| e.key().0 <= now) {
                let (to, event) = entry.remove();
                self.happen(now, to, event);
            }
            if now % BEAT == 0 {
                for rank in 0..self.vigils.len() {
                    self.happen(now, rank, Event::Tick);
                }
            }
        }
    }
}

fn survivors_raise(ranks: usize, seed: u64, victim: usize, when: u64, fate: Fate, within: u64) {
    let mut net = Net::new(ranks, seed);
    net.run(when + within, victim, when, fate);
    for rank in (0..ranks).filter(|r| *r != victim) {
        let failure = net.raised[rank].as_ref();
        let guilty = failure.map(|f| f.guilty);
        assert_eq!(guilty, Some(victim), "rank {rank} of {ranks}, {fate:?} at {when}: {failure:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn everybody_learns_of_a_death_or_a_surrender_at_once(
        ranks in 2usize..9, seed: u64, victim in 0usize..8, when in 0u64..3000, gives_up: bool,
    ) {
        let fate = if gives_up { Fate::GivesUp } else { Fate::Killed };
        survivors_raise(ranks, seed, victim % ranks, when, fate, 3 * MOST_DELAY);
    }

    #[test]
    fn everybody_learns_of_a_stop_within_the_heartbeat(
        ranks in 2usize..9, seed: u64, victim in 0usize..8, when in 0u64..3000,
    ) {
        let within = HEARTBEAT + 2 * BEAT + 3 * MOST_DELAY;
        survivors_raise(ranks, seed, victim % ranks, when, Fate::Stopped, within);
    }

    #[test]
    fn nobody_cries_wolf(ranks in 2usize..9, seed: u64, victim in 1usize..8, when in 0u64..3000) {
        let mut net = Net::new(ranks, seed);
        // Rank 0 stays until all have left; any other may leave when it likes.
        let victim = 1 + victim % (ranks - 1).max(1);
        net.run(when + 3 * HEARTBEAT, victim.min(ranks - 1), when, Fate::Leaves);
        prop_assert!(net.raised.iter().all(|r| r.is_none()), "{:?}", net.raised);
    }
}
