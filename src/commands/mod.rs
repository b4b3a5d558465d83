//! One file per command.

pub mod bench;
pub mod data;
pub mod launch;
