//! Failure detection: the board on which ranks publish their state, waiting with deadlines, finding the
//! rank that caused a failure, and telling all ranks about it.

pub(crate) mod alarm;
pub(crate) mod blame;
pub(crate) mod board;
pub(crate) mod control;
pub(crate) mod failure_detector;
pub(crate) mod heartbeat;
pub(crate) mod poll;
pub(crate) mod recorder;
pub(crate) mod watch;
