//! Events: points in a device's sequence of operations.

use std::time::{Duration, Instant};

use lockstep_cuda::StreamEvent;

use super::{Backend, Device};

/// A point in the sequence of a device's operations, with the time at which the device reached it.
///
/// ```
/// use lockstep_kernels::{Device, Dtype, Tag};
///
/// let device = Device::cpu(1);
/// let start = device.record();
/// let zeros = device.zeros(100, 100, Dtype::F32, Tag::Buffers);
/// let end = device.record();
/// end.wait(); // `zeros` is complete.
/// println!("{:?}", end.elapsed_since(&start));
/// # drop(zeros);
/// ```
pub struct Event(Timestamp);

enum Timestamp {
    /// The CPU has completed all earlier operations when it records an event.
    Cpu(Instant),
    Cuda(StreamEvent),
}

impl Device {
    /// Records an event after all operations issued so far.
    pub fn record(&self) -> Event {
        match &self.0.backend {
            Backend::Cpu(_) => Event(Timestamp::Cpu(Instant::now())),
            Backend::Cuda(cuda) => Event(Timestamp::Cuda(cuda.record())),
        }
    }

    /// Later operations of this device wait for an event of a copy, or of another device on the same hardware.
    /// The host does not wait.
    pub fn wait_for(&self, event: &Event) {
        match (&self.0.backend, &event.0) {
            (Backend::Cuda(cuda), Timestamp::Cuda(event)) => cuda.stream().wait_for(event),
            _ => event.wait(),
        }
    }
}

impl Event {
    /// Blocks the host until the device has reached this event.
    pub fn wait(&self) {
        match &self.0 {
            Timestamp::Cpu(_) => {}
            Timestamp::Cuda(event) => event.wait(),
        }
    }

    /// Time between two events of the same device; zero if `earlier` was recorded later. Waits for both.
    pub fn elapsed_since(&self, earlier: &Event) -> Duration {
        match (&self.0, &earlier.0) {
            (Timestamp::Cpu(end), Timestamp::Cpu(start)) => end.saturating_duration_since(*start),
            (Timestamp::Cuda(end), Timestamp::Cuda(start)) => end.elapsed_since(start),
            _ => panic!("the events are of different devices"),
        }
    }
}

impl Event {
    pub(super) fn of_stream(event: StreamEvent) -> Event {
        Event(Timestamp::Cuda(event))
    }

    /// Calls `f` with the event of a GPU's stream.
    ///
    /// # Panics
    /// If the event is of a CPU.
    pub(super) fn on_stream<R>(&self, f: impl FnOnce(&StreamEvent) -> R) -> R {
        match &self.0 {
            Timestamp::Cuda(event) => f(event),
            Timestamp::Cpu(_) => panic!("the event is of another device"),
        }
    }

    /// The time between two events if the host knows it without waiting.
    pub(super) fn duration_now(&self, earlier: &Event) -> Option<Duration> {
        match (&self.0, &earlier.0) {
            (Timestamp::Cpu(_), Timestamp::Cpu(_)) => Some(self.elapsed_since(earlier)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Tag};

    #[test]
    fn events_are_ordered_and_their_times_add_up() {
        let device = Device::cpu(2);
        let mut x = device.zeros(64, 64, Dtype::F32, Tag::Buffers);
        let host = Instant::now();
        let events: Vec<Event> = (0..4)
            .map(|i| {
                device.fill(x.view_mut(), i as f32);
                device.record()
            })
            .collect();
        events.iter().for_each(Event::wait);
        device.synchronize();
        let host = host.elapsed();
        let steps: Duration = events.windows(2).map(|pair| pair[1].elapsed_since(&pair[0])).sum();
        let total = events[3].elapsed_since(&events[0]);
        assert_eq!(steps, total);
        assert!(total <= host, "{total:?} on the device within {host:?}");
        assert_eq!(events[0].elapsed_since(&events[0]), Duration::ZERO);
        assert_eq!(events[0].elapsed_since(&device.record()), Duration::ZERO);
    }

    /// Operations issued before `wait` or `synchronize` are visible to the host afterwards.
    #[test]
    fn operations_before_an_event_are_complete_after_waiting() {
        let device = Device::cpu(2);
        let mut x = device.empty(1, 5, Dtype::F32, Tag::Buffers);
        device.fill(x.view_mut(), 3.0);
        device.record().wait();
        assert_eq!(x.view().host::<f32>(), [3.0; 5]);
        device.fill(x.view_mut(), 4.0);
        device.synchronize();
        assert_eq!(x.view().host::<f32>(), [4.0; 5]);
    }
}
