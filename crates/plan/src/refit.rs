//! Adapts a layout to another number of ranks, after ranks were lost or added. Validity is decided by
//! `Plan::resolve`.

use crate::config::{Config, Layout};
use crate::plan::Plan;
use crate::resolve::Environment;

/// Returns `config` with the best layout for at most `env.ranks` ranks, or None if there is none. `Config::ranks` of
/// the result is the number of ranks used; the others stay idle.
///
/// Only the layout changes, so the training is the same. The degrees of tensor, context and pipe are kept if enough
/// ranks are left, with the largest number of replicas that fits and divides the batch. Otherwise these degrees
/// shrink: the choice uses the most ranks, then stays closest to the original degrees.
///
/// ```
/// use lockstep_plan::{Config, Environment, refit};
///
/// let text = "[model]\npreset = \"tiny\"\n[train]\nglobal_batch = 32\n[layout]\ndata = 4\ntensor = 2";
/// let fewer = refit(&Config::parse(text, &[]), &Environment::one_host(7, 8)).unwrap();
/// // Three replicas would not divide the batch of 32, so two replicas are used and three ranks stay idle.
/// assert_eq!((fewer.layout.data, fewer.layout.tensor, fewer.ranks()), (Some(2), Some(2), 4));
/// ```
pub fn refit(config: &Config, env: &Environment) -> Option<Config> {
    let Layout { tensor, context, pipe, .. } = config.layout;
    let typed = [tensor, context, pipe].map(|degree| degree.unwrap_or(1).max(1));
    if let Some(kept) = with_axes(config, env, typed) {
        return Some(kept);
    }
    let mut best: Option<(usize, f64, Config)> = None;
    for axes in smaller(typed) {
        let Some(found) = with_axes(config, env, axes) else { continue };
        let (ranks, far) = (found.ranks(), distance(typed, axes));
        let better = best
            .as_ref()
            .is_none_or(|(most, near, _)| ranks > *most || (ranks == *most && far < *near - 1e-9));
        if better {
            best = Some((ranks, far, found));
        }
    }
    best.map(|(.., config)| config)
}

/// The largest number of replicas that is valid with these degrees of tensor, context and pipe.
fn with_axes(config: &Config, env: &Environment, axes: [usize; 3]) -> Option<Config> {
    let per_replica: usize = axes.iter().product();
    (1..=env.ranks / per_replica).rev().find_map(|data| {
        let changed = [changed(config, axes, data, false), changed(config, axes, data, true)];
        let env = |config: &Config| Environment { ranks: config.ranks(), ..env.clone() };
        changed.into_iter().find(|config| Plan::resolve(config, &env(config)).is_ok())
    })
}

/// The layout with other degrees. `shard` and `expert` shrink to a divisor of the new number of replicas.
fn changed(config: &Config, axes: [usize; 3], data: usize, plain_schedule: bool) -> Config {
    let mut config = config.clone();
    let [tensor, context, pipe] = axes;
    let replicas = data * context;
    let among = |typed: usize| {
        (1..=typed.min(replicas)).rev().find(|part| replicas.is_multiple_of(*part)).unwrap_or(1)
    };
    let layout = &mut config.layout;
    (layout.data, layout.tensor) = (Some(data), Some(tensor));
    (layout.context, layout.pipe) = (Some(context), Some(pipe));
    layout.shard = layout.shard.map(among);
    layout.expert = layout.expert.map(among);
    if plain_schedule {
        // Some schedules require the micro-batches to be a multiple of the stages.
        (layout.schedule, layout.chunks) = (None, None);
    }
    config
}

/// All degrees that are at most the given ones and not equal to them.
fn smaller([tensor, context, pipe]: [usize; 3]) -> Vec<[usize; 3]> {
    // The first of equally close choices wins: one that keeps the tensor degree, then the pipeline degree.
    let mut all = Vec::new();
    for t in (1..=tensor).rev() {
        for p in (1..=pipe).rev() {
            all.extend((1..=context).rev().map(|c| [t, c, p]));
        }
    }
    all.retain(|axes| *axes != [tensor, context, pipe]);
    all
}

/// Sum over the axes of log2 of the reduction.
fn distance(typed: [usize; 3], axes: [usize; 3]) -> f64 {
    let doublings = |(typed, now): (usize, usize)| (typed as f64 / now as f64).log2();
    typed.into_iter().zip(axes).map(doublings).sum()
}
