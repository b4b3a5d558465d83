//! One file per command.

pub mod launch;
