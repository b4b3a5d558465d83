//! What a collective costs: the traffic of each member by formula, and the time that follows from it
//! on links of given latency and bandwidth. Pure; the tests hold the formulas against what was sent.

use std::ops::Add;

/// What one member sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Traffic {
    pub messages: u64,
    pub bytes: u64,
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        Traffic { messages: self.messages + other.messages, bytes: self.bytes + other.bytes }
    }
}
