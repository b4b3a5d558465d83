//! One file per command.

pub mod bench;
pub mod ckpt;
pub mod data;
pub mod export;
pub mod generate;
pub mod import;
pub mod launch;
pub mod plan;
mod predicted;
mod progress;
mod replay;
mod screen;
pub mod train;
pub mod verify;
