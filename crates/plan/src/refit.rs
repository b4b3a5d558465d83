//! The same run on another number of ranks: what becomes of its layout when ranks are lost or come back. Judges
//! nothing itself: what a model allows, `Plan::resolve` says.

use crate::config::{Config, Layout};
use crate::plan::Plan;
use crate::resolve::Environment;

/// `config` with the layout that makes the best of at most `around.ranks` ranks, or none when there is no such
/// layout. How many of them it takes, `Config::ranks` of the result says; the others have nothing to do.
///
/// Model, batch and everything else stay, so that it is the same training. The axes that cut the model (tensor,
/// context, pipe) are kept as long as there are ranks for them, and there are as many replicas as then find room and
/// divide the batch. Only where that is impossible the model is cut into fewer pieces: into those that keep the most
/// ranks at work, and of these the ones that are nearest to what was typed.
///
/// ```
/// use lockstep_plan::{Config, Environment, refit};
///
/// let typed = "[model]\npreset = \"tiny\"\n[train]\nglobal_batch = 32\n[layout]\ndata = 4\ntensor = 2";
/// let fewer = refit(&Config::parse(typed, &[]), &Environment::one_host(7, 8)).unwrap();
/// // Three replicas would not divide the batch of 32: two of them, and three ranks without work.
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

/// As many replicas as can be with these degrees of tensor, context and pipe.
fn with_axes(config: &Config, env: &Environment, axes: [usize; 3]) -> Option<Config> {
    let per_replica: usize = axes.iter().product();
    (1..=env.ranks / per_replica).rev().find_map(|data| {
        let changed = [changed(config, axes, data, false), changed(config, axes, data, true)];
        let env = |config: &Config| Environment { ranks: config.ranks(), ..env.clone() };
        changed.into_iter().find(|config| Plan::resolve(config, &env(config)).is_ok())
    })
}

/// The same layout with other degrees. What is dealt out among replicas is dealt out among as many as there are.
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
        // Some need a number of micro-batches that goes with the number of stages.
        (layout.schedule, layout.chunks) = (None, None);
    }
    config
}

/// Every choice of no more pieces along any axis, and of fewer along one.
fn smaller([tensor, context, pipe]: [usize; 3]) -> Vec<[usize; 3]> {
    // Of equally near ones the first is taken: that which keeps the tensor axis, then the pipeline.
    let mut all = Vec::new();
    for t in (1..=tensor).rev() {
        for p in (1..=pipe).rev() {
            all.extend((1..=context).rev().map(|c| [t, c, p]));
        }
    }
    all.retain(|axes| *axes != [tensor, context, pipe]);
    all
}

/// How many times fewer pieces, counted in doublings.
fn distance(typed: [usize; 3], axes: [usize; 3]) -> f64 {
    let doublings = |(typed, now): (usize, usize)| (typed as f64 / now as f64).log2();
    typed.into_iter().zip(axes).map(doublings).sum()
}
