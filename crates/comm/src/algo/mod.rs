//! The collectives, one file per algorithm, each with its price. They know members, bytes and folds;
//! the links between members are the lane's.

pub(crate) mod direct;
pub(crate) mod flat;
pub(crate) mod halving;
pub(crate) mod ring;
pub(crate) mod tree;
pub(crate) mod two_level;

use crate::group::lane::Lane;

/// The members that take part, in order: the whole group, or a line across its hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Team {
    pub members: Vec<usize>,
    /// Our place among them.
    pub me: usize,
}

impl Team {
    pub(crate) fn whole(lane: &Lane) -> Team {
        Team { members: (0..lane.members.len()).collect(), me: lane.me }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The member `steps` places after us, around the end.
    pub(crate) fn after(&self, steps: usize) -> usize {
        self.members[(self.me + steps) % self.size()]
    }

    /// The member `steps` places before us.
    pub(crate) fn before(&self, steps: usize) -> usize {
        self.members[(self.me + self.size() - steps % self.size()) % self.size()]
    }
}
