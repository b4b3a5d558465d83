//! Messages on device memory. With the engine `shared`, the sender offers its buffer and the receiver copies it; with
//! `nccl`, both enqueue their side. The host compares the calls of both and does not wait for the GPU. MPI sends and
//! receives through buffers of its own.

use super::shared::{MessageWords, Shared};
use super::{DeviceGroup, DeviceSlice, Engine};
use crate::call::error::Result;
use crate::call::{Algo, Call};
use crate::group::messages::End;
use crate::group::track::Pending;
use crate::health::watch::Watch;
use crate::link::{Rx, Tx};
use crate::nccl::MessagePeers;
use lockstep_cuda::{Stream, StreamEvent};
use lockstep_types::{bytes_of, bytes_of_mut};

impl DeviceGroup {
    /// Prepares messages between `peers`, which NCCL needs and other engines do not. All members call it, without messages
    /// in flight.
    pub fn connect(&self, peers: MessagePeers) -> Result<()> {
        match &self.state.engine {
            Engine::Nccl(nccl) => nccl.connect(&self.group, peers),
            _ => Ok(()),
        }
    }

    /// Whether messages to and from a member can be sent on device memory. Otherwise they are staged.
    pub fn has_messages(&self, peer: usize) -> bool {
        match &self.state.engine {
            Engine::Nccl(nccl) => nccl.is_connected(peer),
            _ => true,
        }
    }

    /// [`crate::Group::send`]. Returns when the send is enqueued; later operations of the stream may overwrite the message.
    /// May wait until the receiver has enqueued its side: ranks that send to each other start their sends.
    pub fn send(&self, stream: &Stream, message: DeviceSlice, to: usize) -> Result<()> {
        self.check_message_peer(to)?;
        let (inner, track) = (&self.group.inner, &self.group.inner.messages.to[to]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let call = self.message_call(message, number);
            let _span = inner.span(&call, "send", Some((inner.me, to)));
            inner.recorded(call, spin, |watch| match &self.state.engine {
                Engine::Shared(shared) => offer(shared, (watch, end.link()), stream, (message, to)),
                Engine::Nccl(nccl) => nccl.send((watch, end.link()), stream, (message, to)),
                #[cfg(feature = "mpi")]
                Engine::Mpi(gpu) => {
                    let place = crate::mpi::Place { gpu, stream };
                    end.mpi().send_from_device(&watch, place, message)
                }
                Engine::Host => unreachable!("not a device group"),
            })
        })
    }

    /// [`crate::Group::receive`].
    pub fn receive(&self, stream: &Stream, message: DeviceSlice, from: usize) -> Result<()> {
        self.check_message_peer(from)?;
        let (inner, track) = (&self.group.inner, &self.group.inner.messages.from[from]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let call = self.message_call(message, number);
            let _span = inner.span(&call, "receive", Some((from, inner.me)));
            inner.recorded(call, spin, |watch| match &self.state.engine {
                Engine::Shared(shared) => {
                    take(shared, (watch, end.link()), stream, (message, from))
                }
                Engine::Nccl(nccl) => nccl.receive((watch, end.link()), stream, (message, from)),
                #[cfg(feature = "mpi")]
                Engine::Mpi(gpu) => {
                    let place = crate::mpi::Place { gpu, stream };
                    end.mpi().receive_on_device(&watch, place, message)
                }
                Engine::Host => unreachable!("not a device group"),
            })
        })
    }

    fn message_call(&self, message: DeviceSlice, number: u64) -> Call {
        let call = self.group.inner.transfer_call(message.dtype(), message.bytes(), number);
        match self.state.engine {
            // Never matches a message through host memory, which has the same words otherwise.
            Engine::Nccl(_) => Call { algo: Algo::Nccl, ..call },
            _ => call,
        }
    }

    fn check_message_peer(&self, peer: usize) -> Result<()> {
        self.group.check_peer(peer)?;
        if self.has_messages(peer) {
            return Ok(());
        }
        let what = format!("ranks {} and {peer} of group {}", self.group.rank(), self.group.name());
        Err(self.group.misuse(format!("{what} are not connected for messages; call connect first")))
    }

    /// Starts [`DeviceGroup::send`] on the communication thread, on a stream that waits for `ready`. Returns `owner`, which
    /// keeps the message, and an event after which it may be overwritten.
    pub fn start_send<K: Send + 'static>(
        &self,
        ready: StreamEvent,
        message: DeviceSlice,
        owner: K,
        to: usize,
    ) -> Pending<Result<(K, StreamEvent)>> {
        let Some(track) = self.group.inner.messages.to.get(to) else {
            return Pending::ready(self.group.check_peer(to).map(|()| (owner, ready)));
        };
        let group = self.clone();
        track.start(move || {
            let stream = group.state.sends[to].get(&ready);
            stream.wait_for(&ready);
            group.send(stream, message, to).map(|()| (owner, stream.record()))
        })
    }

    /// Starts [`DeviceGroup::receive`] on the communication thread, on a stream that waits for `ready`. Returns `owner`,
    /// which keeps the message, and an event after which it is complete.
    pub fn start_receive<K: Send + 'static>(
        &self,
        ready: StreamEvent,
        message: DeviceSlice,
        owner: K,
        from: usize,
    ) -> Pending<Result<(K, StreamEvent)>> {
        let Some(track) = self.group.inner.messages.from.get(from) else {
            return Pending::ready(self.group.check_peer(from).map(|()| (owner, ready)));
        };
        let group = self.clone();
        track.start(move || {
            let stream = group.state.receives[from].get(&ready);
            stream.wait_for(&ready);
            group.receive(stream, message, from).map(|()| (owner, stream.record()))
        })
    }
}

/// Offers a message to a member and waits until that member has enqueued its copy.
fn offer(
    shared: &Shared,
    (watch, end): (Watch, &mut End<Tx>),
    stream: &Stream,
    (message, to): (DeviceSlice, usize),
) -> Result<()> {
    let words = shared.offer(&watch, stream, message, to)?;
    end.send(&watch, bytes_of(&words))?;
    if let Err(error) = end.wait_until_taken(&watch) {
        // The receiver may be copying the message, which the caller may free now.
        shared.settle();
        return Err(error);
    }
    shared.wait_until_taken(stream, to);
    Ok(())
}

/// Copies a message that a member offers.
fn take(
    shared: &Shared,
    (watch, end): (Watch, &mut End<Rx>),
    stream: &Stream,
    (message, from): (DeviceSlice, usize),
) -> Result<()> {
    let mut words = MessageWords::default();
    end.receive(&watch, bytes_of_mut(&mut words))?;
    shared.take(&watch, stream, words, (message, from))?;
    end.take();
    Ok(())
}
