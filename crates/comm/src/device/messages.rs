//! Messages on device memory. With `shared`, the sender offers its buffer and the receiver copies it; with `nccl`, both
//! enqueue their side. The host compares the calls of both and does not wait for the GPU.

use super::shared::{MessageWords, Shared};
use super::{DeviceGroup, DeviceSlice, Engine};
use crate::call::error::Result;
use crate::call::{Algo, Call};
use crate::group::messages::End;
use crate::group::track::Pending;
use crate::health::watch::Watch;
use crate::link::{Rx, Tx};
use lockstep_cuda::{Stream, StreamEvent};
use lockstep_types::{bytes_of, bytes_of_mut};

impl DeviceGroup {
    /// [`crate::Group::send`]. Returns when the send is enqueued; later operations of the stream may overwrite the message.
    /// May wait until the receiver has enqueued its side: ranks that send to each other start their sends.
    pub fn send(&self, stream: &Stream, message: DeviceSlice, to: usize) -> Result<()> {
        self.check_message_peer(to)?;
        let (inner, track) = (&self.group.inner, &self.group.inner.messages.to[to]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let end = end.link();
            let call = self.message_call(message, number);
            let _span = inner.span(&call, "send", Some((inner.me, to)));
            inner.recorded(call, spin, |watch| match &self.state.engine {
                Engine::Shared(shared) => offer(shared, (watch, end), stream, (message, to)),
                Engine::Nccl(nccl) => nccl.send((watch, end), stream, (message, to)),
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
            let end = end.link();
            let call = self.message_call(message, number);
            let _span = inner.span(&call, "receive", Some((from, inner.me)));
            inner.recorded(call, spin, |watch| match &self.state.engine {
                Engine::Shared(shared) => take(shared, (watch, end), stream, (message, from)),
                Engine::Nccl(nccl) => nccl.receive((watch, end), stream, (message, from)),
                Engine::Host => unreachable!("not a device group"),
            })
        })
    }

    fn message_call(&self, message: DeviceSlice, number: u64) -> Call {
        let call = self.group.inner.transfer_call(message.dtype(), message.bytes(), number);
        match self.state.engine {
            // Never matches a message through host memory, which has the same words otherwise.
            Engine::Nccl(_) => Call { algo: Algo::Nccl, ..call },
            Engine::Shared(_) | Engine::Host => call,
        }
    }

    fn check_message_peer(&self, peer: usize) -> Result<()> {
        self.group.check_peer(peer)?;
        if matches!(self.state.engine, Engine::Nccl(_)) && peer == self.group.rank() {
            let what = format!("rank {peer} of group {} cannot send to itself", self.group.name());
            return Err(self.group.misuse(format!("{what} with NCCL; copy the message instead")));
        }
        Ok(())
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
