//! One file per command.

pub mod bench;
pub mod ckpt;
pub mod data;
pub mod device;
pub mod export;
pub mod generate;
pub mod import;
pub mod launch;
mod output;
pub mod plan;
mod prediction;
mod progress;
mod replay;
pub mod train;
pub mod trees;
pub mod verify;
