//! Traffic of one member in a collective, in messages and bytes.

use std::ops::{Add, Sub};

/// Messages and bytes sent by one member.
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

impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, other: Traffic) -> Traffic {
        Traffic { messages: self.messages - other.messages, bytes: self.bytes - other.bytes }
    }
}

impl std::iter::Sum for Traffic {
    fn sum<I: Iterator<Item = Traffic>>(iter: I) -> Traffic {
        iter.fold(Traffic::default(), Add::add)
    }
}
