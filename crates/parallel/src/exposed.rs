//! A clock for exposed communication: time that a rank waits for collectives instead of computing, by axis.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use lockstep_comm::trace::{CommAxis, SpanKind, Tracer};
use lockstep_kernels::{Device, Event};

/// Exposed communication of each axis, in the order of [`CommAxis::ALL`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExposedTimes(pub [Duration; CommAxis::ALL.len()]);

impl ExposedTimes {
    pub fn add(&mut self, axis: CommAxis, time: Duration) {
        self.0[axis as usize] += time;
    }

    pub fn of(&self, axis: CommAxis) -> Duration {
        self.0[axis as usize]
    }

    /// Time of all axes.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

impl std::ops::AddAssign for ExposedTimes {
    fn add_assign(&mut self, other: ExposedTimes) {
        CommAxis::ALL.into_iter().for_each(|axis| self.add(axis, other.of(axis)));
    }
}

/// How long a communication kept this rank from computing.
pub enum Waited {
    /// The host computes, and waited itself.
    Host(Duration),
    /// The compute stream of a GPU was at the first event before the communication, and at the second after it. The host may
    /// be far ahead.
    Gpu(Event, Event),
}

impl Waited {
    /// The time, once it is known. On a GPU, waits for the end of the communication.
    pub fn time(&self) -> Duration {
        match self {
            Waited::Host(time) => *time,
            Waited::Gpu(start, end) => end.elapsed_since(start),
        }
    }
}

#[derive(Default)]
pub(crate) struct Exposed {
    times: Cell<ExposedTimes>,
    /// Communications of a GPU whose times may not be known yet.
    pending: RefCell<Vec<(CommAxis, Waited)>>,
    gpu: Option<Observed>,
    pub tracer: Tracer,
}

/// A GPU whose compute stream is observed while an axis communicates.
struct Observed {
    device: Device,
    /// By axis, whether it communicates. An event ends a list of operations, so none is recorded without a reason.
    axes: [bool; CommAxis::ALL.len()],
}

/// Pending communications at most. When there are more, the older half is added up: evaluations take no times.
const MOST_PENDING: usize = 1024;

impl Exposed {
    pub fn new(tracer: &Tracer) -> Exposed {
        Exposed { tracer: tracer.clone(), ..Exposed::default() }
    }

    /// Observes the compute stream of a GPU instead of the host, for the axes that communicate.
    pub fn observe(&mut self, gpu: &Device, communicates: impl Fn(CommAxis) -> bool) {
        self.gpu = Some(Observed { device: gpu.clone(), axes: CommAxis::ALL.map(communicates) });
    }

    /// Counts the time of `communication`.
    pub fn timed<R>(&self, axis: CommAxis, communication: impl FnOnce() -> R) -> R {
        let (result, waited) = self.measured(axis, communication);
        match waited {
            Waited::Host(time) => self.add(axis, time),
            Waited::Gpu(..) => {
                let mut pending = self.pending.borrow_mut();
                if pending.len() >= MOST_PENDING {
                    self.settle(pending.drain(..MOST_PENDING / 2));
                }
                pending.push((axis, waited));
            }
        }
        result
    }

    /// Measures the time of `communication` without counting it.
    pub fn measured<R>(&self, axis: CommAxis, communication: impl FnOnce() -> R) -> (R, Waited) {
        let gpu = self.gpu.as_ref().filter(|gpu| gpu.axes[axis as usize]);
        let start = gpu.map(|gpu| gpu.device.record());
        let begin = Instant::now();
        let result = communication();
        let time = begin.elapsed();
        self.tracer.measured(SpanKind::Exposed, axis.name(), begin, time);
        let waited = match start.zip(gpu) {
            Some((start, gpu)) => Waited::Gpu(start, gpu.device.record()),
            None => Waited::Host(time),
        };
        (result, waited)
    }

    /// The times since the last call. On a GPU, waits until they are known.
    pub fn take(&self) -> ExposedTimes {
        self.settle(self.pending.borrow_mut().drain(..));
        self.times.take()
    }

    /// Drops the times since the last call.
    pub fn forget(&self) {
        self.pending.borrow_mut().clear();
        self.times.take();
    }

    fn settle(&self, communications: impl Iterator<Item = (CommAxis, Waited)>) {
        communications.for_each(|(axis, waited)| self.add(axis, waited.time()));
    }

    fn add(&self, axis: CommAxis, time: Duration) {
        let mut times = self.times.get();
        times.add(axis, time);
        self.times.set(times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_by_axis_until_they_are_taken_or_forgotten() {
        let clock = Exposed::default();
        let pause = || std::thread::sleep(Duration::from_millis(2));
        clock.timed(CommAxis::Tensor, pause);
        clock.timed(CommAxis::Tensor, pause);
        let (answer, waited) = clock.measured(CommAxis::Data, || 42);
        assert_eq!(answer, 42);
        let times = clock.take();
        assert!(times.of(CommAxis::Tensor) >= Duration::from_millis(4));
        assert_eq!(times.total(), times.of(CommAxis::Tensor));
        assert!(matches!(waited, Waited::Host(_)));
        clock.timed(CommAxis::Pipe, pause);
        clock.forget();
        assert_eq!(clock.take(), ExposedTimes::default());
    }
}
