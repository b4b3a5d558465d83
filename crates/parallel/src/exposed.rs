//! A clock for exposed communication: time that a rank waits for collectives instead of computing, by axis.

use std::cell::Cell;
use std::time::{Duration, Instant};

use lockstep_comm::trace::{CommAxis, SpanKind, Tracer};

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

#[derive(Default)]
pub(crate) struct Exposed {
    times: Cell<ExposedTimes>,
    pub tracer: Tracer,
}

impl Exposed {
    pub fn new(tracer: &Tracer) -> Exposed {
        Exposed { times: Cell::default(), tracer: tracer.clone() }
    }

    /// Counts the time of `communication`.
    pub fn timed<R>(&self, axis: CommAxis, communication: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = communication();
        let time = begin.elapsed();
        self.tracer.measured(SpanKind::Exposed, axis.name(), begin, time);
        let mut times = self.times.get();
        times.add(axis, time);
        self.times.set(times);
        result
    }

    /// The times since the last call.
    pub fn take(&self) -> ExposedTimes {
        self.times.take()
    }
}
