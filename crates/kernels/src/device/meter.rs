//! Where the time of a step goes, operation by operation. Off, it costs one load per operation.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Kinds of work that time is counted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    Matmul,
    Attention,
    Rope,
    Norm,
    Activation,
    Embedding,
    Loss,
    Optimizer,
    Routing,
    Elementwise,
}

impl Operation {
    pub const ALL: [Operation; 10] = [
        Operation::Matmul,
        Operation::Attention,
        Operation::Rope,
        Operation::Norm,
        Operation::Activation,
        Operation::Embedding,
        Operation::Loss,
        Operation::Optimizer,
        Operation::Routing,
        Operation::Elementwise,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Operation::Matmul => "matmul",
            Operation::Attention => "attention",
            Operation::Rope => "rope",
            Operation::Norm => "norm",
            Operation::Activation => "activation",
            Operation::Embedding => "embedding",
            Operation::Loss => "loss",
            Operation::Optimizer => "optimizer",
            Operation::Routing => "routing",
            Operation::Elementwise => "elementwise",
        }
    }
}

/// Time by operation, while it is switched on.
pub struct Meter {
    on: AtomicBool,
    nanos: [AtomicU64; Operation::ALL.len()],
}

impl Meter {
    pub(super) fn new() -> Meter {
        Meter { on: AtomicBool::new(false), nanos: Default::default() }
    }

    /// Starts from zero, or stops.
    pub fn switch(&self, on: bool) {
        if on {
            self.nanos.iter().for_each(|nanos| nanos.store(0, Relaxed));
        }
        self.on.store(on, Relaxed);
    }

    /// What an operation took since the meter was switched on.
    pub fn spent(&self, operation: Operation) -> Duration {
        Duration::from_nanos(self.nanos[operation as usize].load(Relaxed))
    }

    pub(super) fn time<R>(&self, operation: Operation, work: impl FnOnce() -> R) -> R {
        if !self.on.load(Relaxed) {
            return work();
        }
        let start = Instant::now();
        let result = work();
        self.nanos[operation as usize].fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        result
    }
}
