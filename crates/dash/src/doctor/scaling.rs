//! Scaling efficiency: throughput per core compared with a run of the same model on fewer ranks in the same directory.

use lockstep_plan::Plan;
use serde::Serialize;

use super::measured::Measured;
use crate::{RunFolder, list_runs};

/// A comparison with a run on fewer ranks.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Scaling {
    /// The other run.
    pub run: String,
    pub ranks: usize,
    /// Tokens per second and core, relative to the other run.
    pub efficiency: f64,
}

/// Most runs of the directory that are looked at.
const MOST: usize = 200;

/// Compares with the run on the fewest ranks, if there is one.
pub(super) fn scaling(run: &RunFolder, plan: &Plan, measured: &Measured) -> Option<Scaling> {
    if measured.is_busy() {
        return None;
    }
    let others = list_runs(run.path.parent()?).into_iter().take(MOST);
    let comparable = |path: &std::path::PathBuf| -> Option<usize> {
        let text = std::fs::read(path.join("plan.json")).ok()?;
        let other: Plan = serde_json::from_slice(&text).ok()?;
        let same = other.model == plan.model
            && other.data.seq == plan.data.seq
            && other.precision == plan.precision
            && other.device.kind == plan.device.kind;
        (same && other.ranks < plan.ranks).then_some(other.ranks)
    };
    let mut found: Vec<_> = others.filter_map(|path| Some((comparable(&path)?, path))).collect();
    found.sort();
    found.into_iter().find_map(|(ranks, path)| {
        let other = RunFolder::open(&path).ok()?;
        let other_plan = other.plan.as_ref()?;
        let before = Measured::of(&other, other_plan).filter(|before| !before.is_busy())?;
        let rate = |plan: &Plan, measured: &Measured| {
            let cores = (plan.ranks * plan.train.threads.max(1)) as f64;
            plan.tokens_per_step() as f64 / measured.step / cores
        };
        let efficiency = rate(plan, measured) / rate(other_plan, &before);
        efficiency.is_finite().then_some(Scaling { run: other.name.clone(), ranks, efficiency })
    })
}
