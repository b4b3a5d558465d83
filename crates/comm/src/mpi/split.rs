//! Creation of subgroups over MPI, from given members.

use super::channel::Channel;
use super::collectives::Engine;
use super::communicator::Communicator;
use super::supervision::Supervision;
use crate::call::error::Result;
use crate::call::{Algo, Call};
use crate::group::backend::Backend;
use crate::group::messages::{Messages, ReceiveEnd, SendEnd};
use crate::group::{Group, GroupSpec};
use crate::health::watch::Watch;
use crate::memory::symmetric::Registry;
use lockstep_types::Collective;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

impl Group {
    /// Creates a group over a communicator of its members, in group order.
    pub(super) fn over_mpi(spec: GroupSpec, comm: Communicator) -> Group {
        let channel =
            |(member, rank): (usize, &usize)| Box::new(Channel::new(comm.clone(), member, *rank));
        let channels = || spec.members.iter().enumerate().map(channel);
        let messages = Messages::new(channels().map(SendEnd::Mpi), channels().map(ReceiveEnd::Mpi));
        let engine = Engine::new(comm.clone(), spec.members.clone(), spec.me());
        let registry = Arc::new(Registry::default());
        Group::new(spec, Backend::Mpi(Box::new(engine)), messages, registry)
    }

    /// Creates the group of these members; `None` on other members. All members call it, each with the
    /// list that contains it or an empty one.
    pub(crate) fn split_mpi(
        &self,
        members: &[usize],
        id: u64,
        name: &str,
    ) -> Result<Option<Group>> {
        let inner = &self.inner;
        let me = members.iter().position(|m| *m == self.rank());
        let ranks: Arc<[usize]> = members.iter().map(|m| inner.members[*m]).collect();
        let comm = inner.track.run(|sequence, backend| {
            // Recorded as a barrier: nobody continues before all members have called it.
            let call = Call {
                kind: Collective::Barrier,
                algo: Algo::Engine,
                dtype: None,
                op: None,
                root: None,
                count: 0,
                sequence,
                group: inner.id,
            };
            let Backend::Mpi(engine) = backend else { unreachable!("only called for MPI groups") };
            inner.recorded(call, inner.context.spin_policy, |watch| {
                let color = me.map(|_| members[0] as c_int);
                engine.split(&watch, color, me.unwrap_or(0) as c_int, &inner.members)
            })
        })?;
        let context = inner.context.clone();
        let spec = GroupSpec { context, id, name: name.into(), members: ranks };
        Ok(me.map(|_| Group::over_mpi(spec, comm)))
    }
}

impl Engine {
    /// MPI_Comm_split blocks, so another thread calls it while this one checks for failures.
    fn split(
        &mut self,
        watch: &Watch,
        color: Option<c_int>,
        key: c_int,
        peers: &[usize],
    ) -> Result<Communicator> {
        let supervision = Supervision::call(watch, peers);
        self.compare_calls(watch, &supervision)?;
        let (sender, result) = channel();
        let (comm, session) = (self.comm.raw, self.comm.session.clone());
        std::thread::spawn(move || {
            // The receiver is gone if the world broke meanwhile.
            let _ = sender.send(comm.split(color, key));
            drop(session);
        });
        loop {
            match result.recv_timeout(Duration::from_millis(5)) {
                Ok(Ok(raw)) => {
                    return Ok(Communicator { raw, session: self.comm.session.clone() });
                }
                Ok(Err(what)) => return Err(supervision.failed(what)),
                Err(RecvTimeoutError::Timeout) => supervision.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(
                        supervision.failed("the thread that called MPI_Comm_split ended".into())
                    );
                }
            }
        }
    }
}
