//! The ranks that a rank exchanges with, by what they share; and the first exchange that failed.

use std::cell::RefCell;
use std::time::Duration;

use lockstep_comm::{Error, Group, Result, Traffic, World};
use lockstep_plan::context::ContextKind;
use lockstep_plan::{Coord, GroupKind, Mesh};

use crate::context::Context;
use crate::exposed::Exposed;

/// A rank's groups of peers.
///
/// Exchanges inside a block do not return errors: like operations of a device that runs behind, they go on
/// with whatever is in the buffers, every later one fails at once in the broken world, and `check` tells what
/// happened when the pass is over.
pub struct Groups {
    pub mesh: Mesh,
    pub coord: Coord,
    /// Norms and residuals are cut among the ranks of the tensor axis, by tokens.
    pub sequence: bool,
    /// Whether rows of the stream travel while others are multiplied.
    pub(crate) beside: bool,
    /// None where sequences are whole.
    context: Option<Context>,
    groups: Vec<Group>,
    failed: RefCell<Option<Error>>,
    /// Time that the rank spent on exchanges inside blocks and between stages.
    exposed: Exposed,
    /// The world of one that groups of one belong to.
    _alone: World,
}

impl Groups {
    /// All ranks of the world call it.
    pub fn new(world: &Group, mesh: &Mesh, sequence: bool) -> Result<Groups> {
        assert_eq!(world.size(), mesh.ranks(), "the mesh has a place for every rank");
        let alone = lockstep_comm::single_rank();
        let mut groups = Vec::with_capacity(GroupKind::ALL.len());
        for kind in GroupKind::ALL {
            let members = mesh.members(kind, world.rank());
            let some = (0..mesh.ranks()).any(|rank| mesh.members(kind, rank).len() > 1);
            // A group that is one rank everywhere is not worth making.
            let group = if some { world.subgroup(&members, kind.name())? } else { None };
            groups.push(group.unwrap_or_else(|| alone.group().clone()));
        }
        let coord = mesh.coord(world.rank());
        Ok(Groups {
            mesh: *mesh,
            coord,
            sequence: sequence && mesh.tensor > 1,
            beside: false,
            context: None,
            groups,
            failed: RefCell::new(None),
            exposed: Exposed::default(),
            _alone: alone,
        })
    }

    /// Of a rank that trains by itself.
    pub fn alone() -> Groups {
        let alone = lockstep_comm::single_rank();
        let groups = GroupKind::ALL.map(|_| alone.group().clone()).into();
        let (mesh, coord) = (Mesh::ONE, Mesh::ONE.coord(0));
        let (failed, exposed) = (RefCell::new(None), Exposed::default());
        Groups {
            mesh,
            coord,
            sequence: false,
            beside: false,
            context: None,
            groups,
            failed,
            exposed,
            _alone: alone,
        }
    }

    /// The same with sequences of `seq` cut along the context axis. All ranks call it.
    pub fn with_context(mut self, kind: ContextKind, seq: usize) -> Result<Groups> {
        if self.mesh.context > 1 {
            let degrees = (self.mesh.ulysses, self.mesh.context / self.mesh.ulysses);
            self.context = Some(Context::new(self.group(GroupKind::Context), kind, seq, degrees)?);
        }
        Ok(self)
    }

    /// Whether rows of the residual stream travel while others are multiplied; the same on all ranks.
    pub fn beside(mut self, yes: bool) -> Groups {
        self.beside = yes;
        self
    }

    /// Those that have other positions of the same sequences, if there are any.
    pub fn context(&self) -> Option<&Context> {
        self.context.as_ref()
    }

    /// What this rank has sent so far, group by group.
    pub fn traffic(&self) -> impl Iterator<Item = (GroupKind, Traffic)> {
        GroupKind::ALL.into_iter().map(|kind| {
            let traffic = self.group(kind).traffic();
            match (kind, &self.context) {
                // A ring or neighbours alone are the group itself.
                (GroupKind::Context, Some(context)) => match context.degrees() {
                    (1, _) | (_, 1) => (kind, traffic),
                    _ => (kind, traffic + context.traffic()),
                },
                _ => (kind, traffic),
            }
        })
    }

    /// Bytes that this rank has sent so far.
    pub fn sent(&self) -> u64 {
        self.traffic().map(|(_, traffic)| traffic.bytes).sum()
    }

    pub fn group(&self, kind: GroupKind) -> &Group {
        &self.groups[kind as usize]
    }

    /// Does an exchange that the rank waits for, on the clock.
    pub fn exchanged<R>(&self, exchange: impl FnOnce() -> R) -> R {
        self.exposed.timed(exchange)
    }

    /// Time spent on exchanges, since it was last asked.
    pub fn take_exposed(&self) -> Duration {
        let inside = self.context.as_ref().map_or(Duration::ZERO, Context::take_exposed);
        self.exposed.take() + inside
    }

    /// Remembers the first failure.
    pub fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.failed.borrow_mut().get_or_insert(error);
        }
    }

    /// What failed since it was last asked for.
    pub fn check(&self) -> Result<()> {
        self.failed.borrow_mut().take().map_or(Ok(()), Err)
    }
}
