//! Messages on device memory. With the engine `shared`, the sender offers its buffer and the receiver copies it; both
//! return when the copy is enqueued. MPI sends and receives through buffers of its own.

#[cfg(feature = "mpi")]
use super::Engine;
use super::shared::MessageWords;
use super::{DeviceGroup, DeviceSlice};
use crate::call::error::Result;
use crate::group::track::Pending;
use lockstep_cuda::{Stream, StreamEvent};
use lockstep_types::{bytes_of, bytes_of_mut};

impl DeviceGroup {
    /// [`crate::Group::send`]. Returns when the receiver has enqueued its copy; later operations of the stream may
    /// overwrite the message.
    pub fn send(&self, stream: &Stream, message: DeviceSlice, to: usize) -> Result<()> {
        self.group.check_peer(to)?;
        let (inner, track) = (&self.group.inner, &self.group.inner.messages.to[to]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let call = inner.transfer_call(message.dtype(), message.bytes(), number);
            let _span = inner.span(&call, "send", Some((inner.me, to)));
            #[cfg(feature = "mpi")]
            if let Engine::Mpi(gpu) = &self.state.engine {
                let place = crate::mpi::Place { gpu, stream };
                return inner.recorded(call, spin, |watch| {
                    end.mpi().send_from_device(&watch, place, message)
                });
            }
            let (shared, end) = (self.state.engine.shared(), end.link());
            inner.recorded(call, spin, |watch| {
                let words = shared.offer(&watch, stream, message, to)?;
                end.send(&watch, bytes_of(&words))?;
                let taken = end.wait_until_taken(&watch);
                if taken.is_err() {
                    // The receiver may be copying the message, which the caller may free now.
                    shared.settle();
                }
                taken
            })?;
            shared.wait_until_taken(stream, to);
            Ok(())
        })
    }

    /// [`crate::Group::receive`].
    pub fn receive(&self, stream: &Stream, message: DeviceSlice, from: usize) -> Result<()> {
        self.group.check_peer(from)?;
        let (inner, track) = (&self.group.inner, &self.group.inner.messages.from[from]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let call = inner.transfer_call(message.dtype(), message.bytes(), number);
            let _span = inner.span(&call, "receive", Some((from, inner.me)));
            #[cfg(feature = "mpi")]
            if let Engine::Mpi(gpu) = &self.state.engine {
                let place = crate::mpi::Place { gpu, stream };
                return inner.recorded(call, spin, |watch| {
                    end.mpi().receive_on_device(&watch, place, message)
                });
            }
            let (shared, end) = (self.state.engine.shared(), end.link());
            inner.recorded(call, spin, |watch| {
                let mut words = MessageWords::default();
                end.receive(&watch, bytes_of_mut(&mut words))?;
                shared.take(&watch, stream, words, (message, from))?;
                end.take();
                Ok(())
            })
        })
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
            let stream = group.state.sends.get(&ready);
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
            let stream = group.state.receives.get(&ready);
            stream.wait_for(&ready);
            group.receive(stream, message, from).map(|()| (owner, stream.record()))
        })
    }
}
