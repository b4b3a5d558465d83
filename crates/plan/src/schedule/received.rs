//! Which messages of a rank have been received, as far as the rank can know from the messages that it gets itself. The
//! answer follows from the lists alone, so that memory is used again at the same points of every step.

use std::collections::HashMap;

use super::Schedule;
use super::action::Action;

/// For each rank, the number of its steps whose messages have arrived.
type Known = Vec<usize>;

impl Schedule {
    /// For each step of a rank: the earlier actions whose results the other rank is known to have received, once the
    /// messages of this step have arrived. Each action is listed at the first such step. Results that are received only
    /// after the last message are not listed.
    ///
    /// ```
    /// use lockstep_plan::schedule::{Schedule, ScheduleKind};
    ///
    /// let schedule = Schedule::new(ScheduleKind::Gpipe, 2, 1, 2).unwrap();
    /// // The first rank runs 0F0 0F1 0B0 0B1. Both activations have arrived before the first gradient is sent.
    /// let received = schedule.received(0);
    /// let names: Vec<_> = received[2].iter().map(|action| action.to_string()).collect();
    /// assert_eq!(names, ["0F0", "0F1"]);
    /// assert!(received[0].is_empty() && received[1].is_empty() && received[3].is_empty());
    /// ```
    pub fn received(&self, rank: usize) -> Vec<Vec<Action>> {
        let steps: Vec<_> = (0..self.ranks).map(|rank| self.steps(rank)).collect();
        // Where each message is received.
        let mut taken: HashMap<Action, (usize, usize)> = HashMap::new();
        for (taker, list) in steps.iter().enumerate() {
            for (at, step) in list.iter().enumerate() {
                taken.extend(step.receives.iter().map(|message| (message.result_of, (taker, at))));
            }
        }
        // What the sender of each message knew.
        let mut sent: HashMap<Action, Known> = HashMap::new();
        let mut known: Vec<Known> = vec![vec![0; self.ranks]; self.ranks];
        let mut waiting: Vec<Action> = Vec::new();
        let mut received = vec![Vec::new(); steps[rank].len()];
        let mut done = vec![0; self.ranks];
        loop {
            let before = done.clone();
            for (at, list) in steps.iter().enumerate() {
                while let Some(step) = list.get(done[at]) {
                    if !step.receives.iter().all(|message| sent.contains_key(&message.result_of)) {
                        break;
                    }
                    for message in &step.receives {
                        let theirs = &sent[&message.result_of];
                        known[at]
                            .iter_mut()
                            .zip(theirs)
                            .for_each(|(own, new)| *own = (*own).max(*new));
                    }
                    done[at] += 1;
                    known[at][at] = done[at];
                    if at == rank {
                        waiting.retain(|action| {
                            let (taker, step) = taken[action];
                            let arrived = known[rank][taker] > step;
                            if arrived {
                                received[done[rank] - 1].push(*action);
                            }
                            !arrived
                        });
                    }
                    if step.sends_to.is_some() {
                        sent.insert(step.action, known[at].clone());
                        if at == rank {
                            waiting.push(step.action);
                        }
                    }
                }
            }
            if done == before {
                return received;
            }
        }
    }
}
