//! The messages of a schedule: what a rank receives before each of its actions, and where it sends the result. Between
//! two ranks messages arrive in the order of the sender's list, so some arrive before they are used.

use super::Schedule;
use super::action::{Act, Action};

/// One action of a rank and the messages around it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PipelineStep {
    pub action: Action,
    /// Messages to receive before the action, in order. All but the last are for later actions.
    pub receives: Vec<Message>,
    /// The action of another stage whose result is this one's input: received now or earlier.
    pub input: Option<Action>,
    /// The rank that gets the result.
    pub sends_to: Option<usize>,
}

/// The result of an action of another rank: an activation or a gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    pub from: usize,
    pub result_of: Action,
}

impl Message {
    /// Whether it is an activation; otherwise it is a gradient.
    pub fn is_activation(&self) -> bool {
        self.result_of.act == Act::Forward
    }
}

impl Schedule {
    /// The actions of a rank with their messages.
    ///
    /// ```
    /// use lockstep_plan::schedule::{Schedule, ScheduleKind};
    ///
    /// let schedule = Schedule::new(ScheduleKind::Gpipe, 2, 1, 1).unwrap();
    /// let steps = schedule.steps(1);
    /// assert_eq!(steps[0].receives[0].result_of.to_string(), "0F0");
    /// assert_eq!((steps[0].sends_to, steps[1].sends_to), (None, Some(0)));
    /// ```
    pub fn steps(&self, rank: usize) -> Vec<PipelineStep> {
        let stages = self.stages();
        let is_for_rank = |action: &&Action| {
            action.gives_to(stages).is_some_and(|taker| self.rank_of(taker.stage) == rank)
        };
        let mut incoming: Vec<_> =
            self.actions.iter().map(|list| list.iter().filter(is_for_rank).copied()).collect();
        let mut early: Vec<Action> = Vec::new();
        let mut step = |action: Action| {
            let input = action.takes_from(stages);
            let mut receives = Vec::new();
            if let Some(wanted) = input {
                match early.iter().position(|early| *early == wanted) {
                    Some(at) => drop(early.swap_remove(at)),
                    None => {
                        let from = self.rank_of(wanted.stage);
                        for result_of in incoming[from].by_ref() {
                            receives.push(Message { from, result_of });
                            if result_of == wanted {
                                break;
                            }
                            early.push(result_of);
                        }
                    }
                }
            }
            let sends_to = action.gives_to(stages).map(|taker| self.rank_of(taker.stage));
            PipelineStep { action, receives, input, sends_to }
        };
        self.actions[rank].iter().map(|action| step(*action)).collect()
    }
}
