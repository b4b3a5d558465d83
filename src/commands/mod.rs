//! One file per command.

pub mod bench;
pub mod export;
pub mod import;
pub mod launch;
mod progress;
