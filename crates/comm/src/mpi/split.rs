//! Making a group out of a group over MPI. Knows nothing of colours: the members are chosen already.

use super::collectives::Engine;
use super::communicator::Communicator;
use super::line::Line;
use super::oversight::Oversight;
use crate::call::error::Result;
use crate::call::{Algo, Call};
use crate::group::carrier::Carrier;
use crate::group::{Group, renumbered};
use crate::health::watch::Watch;
use crate::link::messages::{Messages, ReceiveEnd, SendEnd};
use crate::memory::symmetric::Registry;
use crate::world::context::Context;
use lockstep_types::Collective;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

impl Group {
    /// A group over a communicator of just its members, in their order.
    pub(super) fn over_mpi(
        context: Arc<Context>,
        id: u64,
        name: &str,
        members: Vec<usize>,
        comm: Communicator,
    ) -> Group {
        let me = members.iter().position(|r| *r == context.rank).expect("we are a member");
        let members: Arc<[usize]> = members.into();
        let hosts: Arc<[usize]> = renumbered(members.iter().map(|r| context.hosts[*r])).into();
        let line =
            |(member, rank): (usize, &usize)| Box::new(Line::new(comm.clone(), member, *rank));
        let lines = || members.iter().enumerate().map(line);
        let messages = Messages::over(lines().map(SendEnd::Mpi), lines().map(ReceiveEnd::Mpi));
        let carrier = Carrier::Mpi(Box::new(Engine::new(comm, members.clone(), me)));
        let registry = Arc::new(Registry::default());
        Group::new(context, id, name, members, me, hosts, carrier, messages, registry)
    }

    /// The communicator of these members of ours, for those who are one of them. All members call
    /// it, each with the list it belongs to or an empty one.
    pub(crate) fn split_mpi(
        &self,
        members: &[usize],
        id: u64,
        name: &str,
    ) -> Result<Option<Group>> {
        let inner = &self.inner;
        let me = members.iter().position(|m| *m == self.rank());
        let ranks = members.iter().map(|m| inner.members[*m]).collect();
        let comm = inner.track.run(|sequence, carrier| {
            // To the members it is a barrier: nobody goes on before all have come.
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
            let patience = inner.context.patience;
            let Carrier::Mpi(engine) = carrier else { unreachable!("only asked of MPI groups") };
            inner.recorded(call, patience, |watch| {
                let colour = me.map(|_| members[0] as c_int);
                engine.split(&watch, colour, me.unwrap_or(0) as c_int, &inner.members)
            })
        })?;
        let group = |_| Group::over_mpi(inner.context.clone(), id, name, ranks, comm);
        Ok(me.map(group))
    }
}

impl Engine {
    /// MPI can split only in a call that blocks: another thread makes it, and this one keeps watch.
    fn split(
        &mut self,
        watch: &Watch,
        colour: Option<c_int>,
        key: c_int,
        peers: &[usize],
    ) -> Result<Communicator> {
        let oversight = Oversight::call(watch, peers);
        self.agree(watch, &oversight)?;
        let (sender, result) = channel();
        let (comm, session) = (self.comm.raw, self.comm.session.clone());
        std::thread::spawn(move || {
            // Nobody listens any more if the world broke meanwhile.
            let _ = sender.send(comm.split(colour, key));
            drop(session);
        });
        loop {
            match result.recv_timeout(Duration::from_millis(5)) {
                Ok(Ok(raw)) => {
                    return Ok(Communicator { raw, session: self.comm.session.clone() });
                }
                Ok(Err(what)) => return Err(oversight.failed(what)),
                Err(RecvTimeoutError::Timeout) => oversight.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(oversight.failed("the thread that splits is gone".into()));
                }
            }
        }
    }
}
