//! One entry of a schedule, and what it waits for.

use std::fmt;

/// What is done with a micro-batch on a stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Act {
    Forward,
    /// Both gradients, of the input and of the weights.
    Backward,
    /// Of a split backward: the gradient of the input, for which the stage before waits.
    Input,
    /// Of a split backward: the gradient of the weights, for which only the optimizer waits.
    Weights,
}

/// Ordered by stage, then act, then micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Action {
    /// Of all stages of the pipeline.
    pub stage: usize,
    pub act: Act,
    pub micro: usize,
}

impl Act {
    /// As it is written; the kind of the schedule says which of the two a `B` is.
    pub fn letter(self) -> char {
        match self {
            Act::Forward => 'F',
            Act::Backward | Act::Input => 'B',
            Act::Weights => 'W',
        }
    }
}

impl Action {
    pub fn new(stage: usize, act: Act, micro: usize) -> Action {
        Action { stage, act, micro }
    }

    /// The action of a neighbouring stage whose result this one takes in. The first stage's forward takes the
    /// batch, the last stage's backward its own loss.
    pub fn takes_from(self, stages: usize) -> Option<Action> {
        let stage = match self.act {
            Act::Forward => self.stage.checked_sub(1)?,
            Act::Backward | Act::Input => {
                self.stage.checked_add(1).filter(|stage| *stage < stages)?
            }
            Act::Weights => return None,
        };
        Some(Action { stage, ..self })
    }

    /// The action of a neighbouring stage that takes in this one's result.
    pub fn gives_to(self, stages: usize) -> Option<Action> {
        let stage = match self.act {
            Act::Forward => self.stage.checked_add(1).filter(|stage| *stage < stages)?,
            Act::Backward | Act::Input => self.stage.checked_sub(1)?,
            Act::Weights => return None,
        };
        Some(Action { stage, ..self })
    }

    /// The action of the same stage and micro-batch that must come before.
    pub fn follows(self) -> Option<Action> {
        let act = match self.act {
            Act::Forward => return None,
            Act::Backward | Act::Input => Act::Forward,
            Act::Weights => Act::Input,
        };
        Some(Action { act, ..self })
    }
}

/// `2F0`: stage 2, forward, micro-batch 0.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.act.letter(), self.micro)
    }
}
