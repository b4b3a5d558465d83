//! Numbers that a device computes for the host.

/// An f64 that a device computes. The host continues until it calls [`get`](Scalar::get).
#[must_use]
pub struct Scalar(Value);

enum Value {
    Ready(f64),
}

impl Scalar {
    /// Waits for the value.
    pub fn get(&self) -> f64 {
        match self.0 {
            Value::Ready(value) => value,
        }
    }
}

impl From<f64> for Scalar {
    fn from(value: f64) -> Scalar {
        Scalar(Value::Ready(value))
    }
}
