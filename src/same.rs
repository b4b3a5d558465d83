//! What all ranks of a training must have in common: this program, its data, and every value of the plan.

use std::fs::File;
use std::path::Path;

use anyhow::Context;
use lockstep_comm::World;
use lockstep_plan::Plan;
use lockstep_trainer::{check_alike, traits};

use crate::run_file::RunFile;

/// Ends with the first difference between two ranks, by name.
pub fn check(world: &World, plan: &Plan, file: &RunFile) -> anyhow::Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let mut mine =
        vec![("program".to_string(), program()?), ("data".to_string(), file.source.identity())];
    mine.extend(traits(plan));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    check_alike(world, host.trim(), &mine)?;
    Ok(())
}

/// The hash of this program's own file, also where that has been replaced since.
fn program() -> anyhow::Result<String> {
    let path = Path::new("/proc/self/exe");
    let file = File::open(path).context("cannot read this program's own file")?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).context("cannot read this program's own file")?;
    let hash = hasher.finalize().to_hex();
    Ok(format!("blake3 {}", &hash[..16]))
}
