//! Numbers that a device computes for the host.

use crate::cuda::PendingScalar;

/// An f64 that a device computes. The host continues until it calls [`get`](Scalar::get).
#[must_use]
pub struct Scalar(Value);

enum Value {
    Ready(f64),
    Cuda(PendingScalar),
}

impl Scalar {
    /// Waits for the value.
    pub fn get(&self) -> f64 {
        match &self.0 {
            Value::Ready(value) => *value,
            Value::Cuda(pending) => pending.get(),
        }
    }

    pub(crate) fn pending(scalar: PendingScalar) -> Scalar {
        Scalar(Value::Cuda(scalar))
    }
}

impl From<f64> for Scalar {
    fn from(value: f64) -> Scalar {
        Scalar(Value::Ready(value))
    }
}
