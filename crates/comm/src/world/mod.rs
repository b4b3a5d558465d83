//! A rank's membership in a world: the group of all ranks, and leaving it.

pub(crate) mod address;
pub(crate) mod context;
pub(crate) mod host;
pub(crate) mod identity;
pub(crate) mod inherited;
pub(crate) mod join;
pub(crate) mod joiner;
pub(crate) mod local_access;
pub(crate) mod measure;
pub(crate) mod member_list;
pub(crate) mod options;
pub(crate) mod rendezvous;
pub(crate) mod threads;
pub mod token;

use crate::call::error::{Cause, Failure};
use crate::group::Group;
use crate::health::board::{Board, RankState};
use crate::health::heartbeat::Heartbeat;
use crate::health::recorder::FlightEntry;
use crate::world::context::Context;
use std::ops::Deref;
use std::sync::Arc;

/// A rank's membership in a world. Used like the [`Group`] of all ranks; dropping it leaves the world.
pub struct World {
    group: Group,
    /// Sends heartbeats, if ranks are processes.
    heartbeat: Option<Heartbeat>,
    /// Finalizes the MPI library, if it carries this world. Dropped last.
    #[cfg(feature = "mpi")]
    session: Option<crate::mpi::SessionGuard>,
}

impl World {
    pub(crate) fn new(group: Group, heartbeat: Option<Heartbeat>) -> World {
        let context = &group.inner.context;
        context.board.set_state(context.rank, RankState::Running);
        // Threads have no heartbeat: a rank without a first heartbeat is never considered silent.
        if heartbeat.is_some() {
            context.board.beat(context.rank);
        }
        World {
            group,
            heartbeat,
            #[cfg(feature = "mpi")]
            session: None,
        }
    }

    #[cfg(feature = "mpi")]
    pub(crate) fn over_mpi(
        group: Group,
        heartbeat: Heartbeat,
        session: crate::mpi::SessionGuard,
    ) -> World {
        let mut world = World::new(group, Some(heartbeat));
        world.session = Some(session);
        world
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The last operations of this rank, oldest first.
    pub fn flight_record(&self) -> Vec<FlightEntry> {
        self.group.inner.context.recorder.entries()
    }

    /// Breaks the world: the calls of all ranks fail with this rank's reason.
    pub fn abort(&self, reason: &str) {
        let context = &self.group.inner.context;
        let text = format!("rank {} aborted: {reason}", context.rank);
        let failure = Failure { culprit: context.rank, cause: Cause::Failed, text };
        context.board.raise_and_forward(context.rank, &failure);
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.group.inner.context
    }

    fn board(&self) -> &Board {
        &self.context().board
    }
}

impl Deref for World {
    type Target = Group;

    fn deref(&self) -> &Group {
        &self.group
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort("it panicked");
        }
        let state = if self.board().is_broken() { RankState::Failed } else { RankState::Left };
        self.board().set_state(self.context().rank, state);
        #[cfg(feature = "mpi")]
        if let Some(session) = &self.session {
            session.leave(self.board());
        }
        // Says goodbye, or forwards the alarm, before the connections close.
        drop(self.heartbeat.take());
    }
}
