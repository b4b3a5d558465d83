//! Whether a schedule does its work: everything once, on the right rank, in an order the rank can keep.
//! Whether ranks wait for each other in a group is `replay`'s question.

use super::Schedule;
use super::action::{Act, Action};
use std::collections::HashMap;

/// Of what is done too often or never, so many are named: a list may owe millions.
const MOST_TOLD: usize = 100;

impl Schedule {
    /// What is wrong with the lists, if anything is.
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
                    wrong.push(format!("rank {rank} does {action} without {before} before it"));
                }
                *seen.entry(*action).or_default() += 1;
            }
        }
        let miscounted = self.owed().filter_map(|action| match seen.get(&action) {
            Some(1) => None,
            Some(times) => Some(format!("{action} is done {times} times")),
            None => Some(format!("{action} is never done")),
        });
        wrong.extend(miscounted.take(MOST_TOLD));
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Why `rank` cannot have this action at all.
    fn misplaced(&self, rank: usize, action: Action) -> Option<String> {
        let (stages, micros) = (self.stages(), self.micros);
        if action.stage >= stages {
            return Some(format!("rank {rank} does {action}, but there are {stages} stages"));
        }
        if action.micro >= micros {
            return Some(format!(
                "rank {rank} does {action}, but there are {micros} micro-batches"
            ));
        }
        if self.rank_of(action.stage) != rank {
            let owner = self.rank_of(action.stage);
            return Some(format!("rank {rank} does {action}, whose stage is on rank {owner}"));
        }
        let split = matches!(action.act, Act::Input | Act::Weights);
        (action.act != Act::Forward && split != self.kind.splits()).then(|| {
            let (act, kind) = (action.act, self.kind);
            format!("rank {rank} does {action} as {act:?}, which {kind} does not have")
        })
    }

    /// All that must be done: each act on each stage, for each micro-batch.
    fn owed(&self) -> impl Iterator<Item = Action> {
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
