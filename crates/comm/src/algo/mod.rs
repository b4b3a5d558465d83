//! Collective algorithms, one file each, with their cost formulas. They know members, bytes and folds;
//! how two members reach each other is decided by the lane.

pub(crate) mod choose;
pub(crate) mod direct;
pub(crate) mod flat;
pub(crate) mod halving;
pub(crate) mod ring;
pub(crate) mod tree;
pub(crate) mod two_level;

use crate::call::error::Result;
use crate::call::fold::Fold;
use crate::lane::Lane;
use crate::link::Inbox;

/// The members that take part in an algorithm: the whole group, or one member per host. Members are
/// addressed by their index in the team.
pub(crate) struct Team<'a> {
    lane: &'a mut Lane,
    /// Group members, in team order.
    members: Vec<usize>,
    /// Our index in the team.
    pub me: usize,
}

impl<'a> Team<'a> {
    pub(crate) fn new(lane: &'a mut Lane, members: Vec<usize>, me: usize) -> Team<'a> {
        Team { lane, members, me }
    }

    pub(crate) fn whole(lane: &'a mut Lane) -> Team<'a> {
        Team { members: (0..lane.members.len()).collect(), me: lane.me, lane }
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// The member `steps` places after us, wrapping around.
    pub(crate) fn after(&self, steps: usize) -> usize {
        (self.me + steps) % self.size()
    }

    /// The member `steps` places before us, wrapping around.
    pub(crate) fn before(&self, steps: usize) -> usize {
        (self.me + self.size() - steps % self.size()) % self.size()
    }

    /// Sends one message and receives another at the same time; either may be absent.
    pub(crate) fn step(
        &mut self,
        out: Option<(usize, &[u8])>,
        inc: Option<(usize, Inbox<'_>)>,
    ) -> Result<()> {
        let out = out.map(|(to, bytes)| (self.members[to], bytes));
        let inc = inc.map(|(from, inbox)| (self.members[from], inbox));
        self.lane.step(out, inc)
    }

    /// Like [`Team::step`]; folds the received message into `acc`.
    pub(crate) fn step_folding(
        &mut self,
        out: Option<(usize, &[u8])>,
        from: usize,
        acc: &mut [u8],
        fold: &Fold,
    ) -> Result<()> {
        let len = acc.len();
        let mut take =
            |at: usize, piece: &[u8]| fold.fold_into(&mut acc[at..at + piece.len()], piece);
        self.step(out, Some((from, Inbox::Each { len, take: &mut take })))
    }

    pub(crate) fn send(&mut self, to: usize, bytes: &[u8]) -> Result<()> {
        self.step(Some((to, bytes)), None)
    }

    pub(crate) fn receive(&mut self, from: usize, bytes: &mut [u8]) -> Result<()> {
        self.step(None, Some((from, Inbox::Into(bytes))))
    }
}
