//! Consistency check before training: all ranks must run the same program on the same data with the same plan.

use std::fs::File;
use std::path::Path;

use anyhow::Context;
use lockstep_comm::World;
use lockstep_plan::Plan;
use lockstep_trainer::{check_consistency, settings};

use crate::run_file::RunFile;

/// Fails with the first value that differs between two ranks.
pub fn check(world: &World, plan: &Plan, file: &RunFile) -> anyhow::Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let mut mine = vec![
        ("program".to_string(), program_hash()?),
        ("data".to_string(), file.source.identity()),
    ];
    mine.extend(settings(plan));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    check_consistency(world, host.trim(), &mine)?;
    Ok(())
}

/// Hash of the running executable, even if its file has been replaced since.
pub fn program_hash() -> anyhow::Result<String> {
    let path = Path::new("/proc/self/exe");
    let file = File::open(path).context("cannot read this program's executable")?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).context("cannot read this program's executable")?;
    let hash = hasher.finalize().to_hex();
    Ok(format!("blake3 {}", &hash[..16]))
}
