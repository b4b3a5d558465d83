//! Whether the world still stands: what ranks show of themselves, who waits for whom, who is to
//! blame, and how everybody hears of it.

pub(crate) mod alarm;
pub(crate) mod blame;
pub(crate) mod board;
pub(crate) mod past;
pub(crate) mod pulse;
pub(crate) mod recorder;
pub(crate) mod vigil;
pub(crate) mod watch;
pub(crate) mod word;
