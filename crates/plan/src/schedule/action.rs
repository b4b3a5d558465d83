//! Actions of a schedule and their dependencies.

use std::fmt;

/// The pass that an action runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Act {
    Forward,
    /// Input and weight gradients together.
    Backward,
    /// Input gradient of a split backward pass; the previous stage waits for it.
    Input,
    /// Weight gradient of a split backward pass; only the optimizer waits for it.
    Weights,
}

/// Ordered by stage, then act, then micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Action {
    /// Stage of the pipeline.
    pub stage: usize,
    pub act: Act,
    pub micro: usize,
}

impl Act {
    /// Letter in the text form. The kind of the schedule decides which backward a `B` is.
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

    /// The action of a neighbouring stage whose result is this one's input. The first stage reads the batch, and the last
    /// stage's backward pass starts from its loss.
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

    /// The action of a neighbouring stage whose input is this one's result.
    pub fn gives_to(self, stages: usize) -> Option<Action> {
        let stage = match self.act {
            Act::Forward => self.stage.checked_add(1).filter(|stage| *stage < stages)?,
            Act::Backward | Act::Input => self.stage.checked_sub(1)?,
            Act::Weights => return None,
        };
        Some(Action { stage, ..self })
    }

    /// The action of the same stage and micro-batch that must run first.
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
