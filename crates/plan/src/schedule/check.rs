//! Validates a schedule: every action once, on the right rank, after its dependencies on that rank. `replay` detects
//! deadlocks between ranks.

use super::Schedule;
use super::action::{Act, Action};
use std::collections::HashMap;

/// Maximum number of missing or repeated actions that are reported.
const MAX_REPORTED: usize = 100;

impl Schedule {
    /// Returns all problems of the lists.
    pub fn check(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        if self.actions.len() != self.ranks {
            wrong.push(format!("{} lists for {} ranks", self.actions.len(), self.ranks));
        }
        let mut seen: HashMap<Action, usize> = HashMap::new();
        for (rank, list) in self.actions.iter().enumerate() {
            for action in list {
                wrong.extend(self.misplaced(rank, *action));
                if let Some(before) = action.follows().filter(|before| !seen.contains_key(before)) {
                    wrong.push(format!("rank {rank} runs {action} before {before}"));
                }
                *seen.entry(*action).or_default() += 1;
            }
        }
        let miscounted = self.required().filter_map(|action| match seen.get(&action) {
            Some(1) => None,
            Some(times) => Some(format!("{action} runs {times} times")),
            None => Some(format!("{action} never runs")),
        });
        wrong.extend(miscounted.take(MAX_REPORTED));
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Reason why `rank` cannot run this action.
    fn misplaced(&self, rank: usize, action: Action) -> Option<String> {
        let (stages, micros) = (self.stages(), self.micros);
        if action.stage >= stages {
            return Some(format!("rank {rank} runs {action}, but there are {stages} stages"));
        }
        if action.micro >= micros {
            return Some(format!(
                "rank {rank} runs {action}, but there are {micros} micro-batches"
            ));
        }
        if self.rank_of(action.stage) != rank {
            let owner = self.rank_of(action.stage);
            return Some(format!("rank {rank} runs {action}, whose stage is on rank {owner}"));
        }
        let split = matches!(action.act, Act::Input | Act::Weights);
        (action.act != Act::Forward && split != self.kind.splits()).then(|| {
            let (act, kind) = (action.act, self.kind);
            format!("rank {rank} runs {action} as {act:?}, which {kind} does not have")
        })
    }

    /// All actions that must run: each act on each stage for each micro-batch.
    fn required(&self) -> impl Iterator<Item = Action> {
        let acts: &[Act] = if self.kind.splits() {
            &[Act::Forward, Act::Input, Act::Weights]
        } else {
            &[Act::Forward, Act::Backward]
        };
        let (stages, micros) = (self.stages(), self.micros);
        (0..stages).flat_map(move |stage| {
            let of_stage = move |act: &Act| {
                let act = *act;
                (0..micros).map(move |micro| Action::new(stage, act, micro))
            };
            acts.iter().flat_map(of_stage)
        })
    }
}
