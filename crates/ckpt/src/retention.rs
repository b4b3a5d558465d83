//! Removes old checkpoints. Only valid checkpoints count: a corrupt one never displaces a good one. Corrupt checkpoints
//! that are newer than the kept ones stay; training replaces them when it reaches their step.

use crate::checkpoint::load;
use crate::disk::Disk;
use crate::error::Result;
use crate::folder::{checkpoints, folder, removed_folder, steps};
use std::collections::BTreeMap;
use std::path::Path;

/// Retention rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// Number of newest checkpoints to keep; 0 keeps all.
    pub newest: usize,
    /// Also keep every step that is a multiple of this; 0 for none.
    pub every: u64,
}

/// Applies a retention rule to a run and remembers which checkpoints are valid.
#[derive(Debug)]
pub struct Retention {
    keep: Keep,
    valid: BTreeMap<u64, bool>,
}

impl Retention {
    pub fn new(keep: Keep) -> Retention {
        Retention { keep, valid: BTreeMap::new() }
    }

    /// Records that the checkpoint of a step was just written or loaded completely. Others are read once, when the rule
    /// depends on them.
    pub fn trust(&mut self, step: u64) {
        self.valid.insert(step, true);
    }

    /// Removes the checkpoints that the rule does not keep, and returns their steps.
    pub fn prune(&mut self, disk: &Disk, run: &Path) -> Result<Vec<u64>> {
        self.prune_to(disk, run, self.keep.newest)
    }

    /// Removes the checkpoint that the next one would displace, if the rule keeps several.
    pub fn make_room(&mut self, disk: &Disk, run: &Path) -> Result<Vec<u64>> {
        // The last valid checkpoint is not removed before the next one is complete.
        self.prune_to(disk, run, self.keep.newest.saturating_sub(1).max(self.keep.newest.min(1)))
    }

    fn prune_to(&mut self, disk: &Disk, run: &Path, newest: usize) -> Result<Vec<u64>> {
        let old = self.older_than_newest(run, newest);
        if old.is_empty() {
            return Ok(old);
        }
        for step in &old {
            disk.rename(&folder(run, *step), &removed_folder(run, *step))?;
        }
        // Sync the renames first, so that a power failure cannot leave a partial checkpoint under its final name.
        disk.sync_folder(&checkpoints(run))?;
        old.iter().try_for_each(|step| disk.remove(&removed_folder(run, *step)))?;
        Ok(old)
    }

    /// Steps before the newest valid ones, without those that are always kept.
    fn older_than_newest(&mut self, run: &Path, newest: usize) -> Vec<u64> {
        let all = steps(run);
        if newest == 0 || all.len() <= newest {
            return vec![];
        }
        let (mut valid, every) = (0, self.keep.every);
        let mut old = vec![];
        for step in all {
            if valid == newest {
                old.push(step);
            } else if self.is_valid(run, step) {
                valid += 1;
            }
        }
        old.retain(|step| every == 0 || !step.is_multiple_of(every));
        old
    }

    fn is_valid(&mut self, run: &Path, step: u64) -> bool {
        let check = || load(&folder(run, step)).is_ok_and(|found| found.check(|_| {}).is_empty());
        *self.valid.entry(step).or_insert_with(check)
    }
}

/// Removes the checkpoints that the rule does not keep, and returns their steps.
pub fn prune(disk: &Disk, run: &Path, keep: Keep) -> Result<Vec<u64>> {
    Retention::new(keep).prune(disk, run)
}
