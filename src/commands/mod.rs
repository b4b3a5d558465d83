//! One file per command.

pub mod bench;
pub mod ckpt;
pub mod completions;
pub mod dash;
pub mod data;
pub mod device;
pub mod doctor;
pub mod export;
pub mod generate;
pub mod import;
pub mod init;
pub mod launch;
mod output;
pub mod plan;
mod prediction;
pub mod presets;
mod progress;
mod replay;
pub mod trace;
pub mod train;
pub mod trees;
pub mod verify;
