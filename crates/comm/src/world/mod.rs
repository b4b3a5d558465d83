//! A rank's membership of a world: the group of all ranks, and what must happen when it ends.

pub(crate) mod context;
pub(crate) mod host;
pub(crate) mod identity;
pub(crate) mod inherited;
pub(crate) mod join;
pub(crate) mod measure;
pub(crate) mod options;
pub(crate) mod roll;
pub(crate) mod threads;
pub mod token;

use crate::call::error::{Cause, Failure};
use crate::group::Group;
use crate::health::board::{Board, State};
use crate::health::pulse::Pulse;
use crate::health::recorder::Entry;
use crate::world::context::Context;
use std::ops::Deref;
use std::sync::Arc;

/// The id of the group of all ranks; all others are derived from it.
pub(crate) const WORLD_ID: u64 = 1;

/// One rank's place in a world. Used like the [`Group`] of all ranks; dropping it leaves the world.
pub struct World {
    group: Group,
    /// Keeps the heartbeat going, where ranks are processes.
    pulse: Option<Pulse>,
    /// Ends the library, where one carries this world. Dropped last.
    #[cfg(feature = "mpi")]
    stay: Option<crate::mpi::Stay>,
}

impl World {
    pub(crate) fn new(group: Group, pulse: Option<Pulse>) -> World {
        let context = &group.inner.context;
        context.board.set_state(context.rank, State::Running);
        // Threads have no heartbeat: without a first sign of life nobody waits for a second.
        if pulse.is_some() {
            context.board.beat(context.rank);
        }
        World {
            group,
            pulse,
            #[cfg(feature = "mpi")]
            stay: None,
        }
    }

    #[cfg(feature = "mpi")]
    pub(crate) fn over_mpi(group: Group, pulse: Pulse, stay: crate::mpi::Stay) -> World {
        let mut world = World::new(group, Some(pulse));
        world.stay = Some(stay);
        world
    }

    /// The group of all ranks, for those who keep one.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The operations of this rank that are still remembered, oldest first.
    pub fn flight_record(&self) -> Vec<Entry> {
        self.group.inner.context.recorder.entries()
    }

    /// Breaks the world on purpose: every rank's calls end with this rank's reason.
    pub fn abort(&self, reason: &str) {
        let context = &self.group.inner.context;
        let text = format!("rank {} gave up: {reason}", context.rank);
        let failure = Failure { guilty: context.rank, cause: Cause::Failed, text };
        context.board.raise_aloud(context.rank, &failure);
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
        let state = if self.board().broken() { State::Failed } else { State::Left };
        self.board().set_state(self.context().rank, state);
        #[cfg(feature = "mpi")]
        if let Some(stay) = &self.stay {
            stay.farewell(self.board());
        }
        // Says goodbye, or passes the alarm on, before the connections close.
        drop(self.pulse.take());
    }
}
