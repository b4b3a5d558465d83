//! `lockstep bench machine`: what this machine does when so many ranks share it, as a file that `plan` and `train` read.

mod busy;
mod references;
mod watch;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_sim::{Accelerator, Cluster, Engine, Fitted, Link, fit};

use crate::machine::available_memory;
use crate::say::{complain, say};
use crate::world::{self, Start};
use watch::Watched;

/// This machine as a cluster: multiplies, attention, passes over memory, and exchanges between ranks
///
/// For each number of ranks, all are at work at once, with their shares of the cores: multiplies by themselves, and
/// steps of reference models, of which no other model is, counted operation by operation. Rounds in which other programs
/// take the cores are done again.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of ranks that share the machine
    #[arg(long, default_value = "1,2,4", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Rounds through all that is measured, of which medians are taken
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Where to write it; `train` looks for runs/machine.toml
    #[arg(long, default_value = "runs/machine.toml")]
    out: PathBuf,
}

/// How long ranks wait for each other.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often what makes no sense is measured.
const TRIES: usize = 2;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.ranks.is_empty() || args.ranks.contains(&0) {
        bail!("--ranks: numbers of at least 1, as in 1,2,4");
    }
    if args.rounds == 0 {
        bail!("--rounds 0: one round at least");
    }
    let start = |ranks| Start { engine: world::Engine::Shm, ranks, default_ranks: 1, logs: None };
    let seen = args.out.with_extension("seen.json");
    if world::is_launched() {
        return world::run(&start(None), PATIENCE, |world| watch::run(world, args.rounds, &seen));
    }
    if let Some(folder) = args.out.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut shared = toml::Table::new();
    for ranks in args.ranks {
        let watch = || {
            world::run(&start(Some(ranks)), PATIENCE, |world| {
                watch::run(world, args.rounds, &seen)
            })?;
            taken(&seen).with_context(|| format!("measuring {ranks} rank(s)"))
        };
        let cluster = measured(ranks, watch)?;
        let table = toml::Value::try_from(&cluster).context("a cluster is plain data")?;
        shared.insert(ranks.to_string(), table);
    }
    let file = toml::Table::from_iter([("shared".to_string(), toml::Value::Table(shared))]);
    std::fs::write(&args.out, toml::to_string(&file)?)
        .with_context(|| format!("cannot write {}", args.out.display()))?;
    say!("written to {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// What the first of the ranks left.
fn taken(path: &Path) -> anyhow::Result<Watched> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("the ranks did not write {}", path.display()))?;
    std::fs::remove_file(path)?;
    Ok(serde_json::from_str(&text)?)
}

/// The machine as it was watched; once more when that makes no sense.
fn measured(
    ranks: usize,
    mut watch: impl FnMut() -> anyhow::Result<Watched>,
) -> anyhow::Result<Cluster> {
    for tried in 1..=TRIES {
        let watched = watch()?;
        match fit(&blank(ranks, &watched)?, &watched.multiplies, &watched.steps) {
            Ok(fitted) => {
                tell(ranks, &watched, &fitted);
                return Ok(fitted.cluster);
            }
            Err(why) if tried < TRIES => complain!("{why}; measuring {ranks} rank(s) again"),
            Err(why) => bail!(
                "{ranks} rank(s): {why}, also when measured again; other programs took {:.0}% of the cores: \
                 stop them, or ask for more --rounds",
                100.0 * watched.others
            ),
        }
    }
    unreachable!("the last try returns")
}

/// Everything that is known before anything is fitted. The accelerator is all cores together.
fn blank(ranks: usize, watched: &Watched) -> anyhow::Result<Cluster> {
    let mut accelerator = Accelerator::built_in("cpu").context("an accelerator called cpu")?;
    accelerator.name = "this machine".into();
    accelerator.memory_gib = available_memory()? as f64 / (1u64 << 30) as f64;
    // A kernel is started by who computes it.
    (accelerator.kernel_us, accelerator.launch_us) = (0.0, 0.0);
    (accelerator.bandwidth_gbs, accelerator.stream) = (watched.copied[1] * ranks as f64, 1.0);
    let link = Link {
        name: "memory".into(),
        span: None,
        start_us: 0.0,
        hop_us: 1.0,
        bandwidth_gbs: 8.0,
        rails: None,
        oversubscription: 1.0,
    };
    Ok(Cluster {
        name: format!("this machine, shared by {ranks}"),
        accelerator,
        per_host: ranks,
        ranks: Some(ranks),
        cores: Some(watched.cores),
        links: vec![link],
        engine: Engine::Lockstep,
        skew: 0.0,
        differs: Vec::new(),
    })
}

fn tell(ranks: usize, watched: &Watched, fitted: &Fitted) {
    let Cluster { accelerator: device, links, skew, .. } = &fitted.cluster;
    let threads = watched.steps[0].plan.train.threads;
    say!(
        "{ranks} rank(s) × {threads} thread(s): {:.0} GFLOP/s in f32 and {:.0} in bf16 of all cores; copies at {:.1} GB/s a rank, {:.1} in a cache",
        1e3 * device.peak.f32,
        1e3 * device.peak.bf16,
        watched.copied[1],
        watched.copied[0],
    );
    if ranks > 1 {
        say!(
            "  sums at {:.2} GB/s and {:.0} µs a meeting; {:.1}% of the computing waits for slower ranks",
            links[0].bandwidth_gbs,
            links[0].hop_us,
            100.0 * skew
        );
    }
    let worst = |of: fn(&(f64, f64)) -> f64| {
        fitted.steps.iter().map(|step| (of(step) - 1.0).abs()).fold(0.0, f64::max)
    };
    say!(
        "  fits multiplies within {:.1}% on average, and every reference step within {:.1}%; {:.1}% when left out",
        100.0 * fitted.multiplies,
        100.0 * worst(|(with, _)| *with),
        100.0 * worst(|(_, without)| *without),
    );
    if watched.others > busy::TOLERATED {
        say!(
            "  other programs took {:.0}% of the cores meanwhile: these are figures of a busy machine",
            100.0 * watched.others
        );
    }
}
