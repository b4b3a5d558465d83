//! `lockstep bench machine`: what this machine does when so many ranks share it, as a file that `plan` and `train` read.

mod busy;
mod pass;
mod passes;
mod references;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use lockstep_sim::{Accelerator, Cluster, Curve, Engine, Fitted, Link, fit};

use crate::machine::available_memory;
use crate::print::{print_error, print_line};
use crate::world::{self, Start};
use pass::Pass;
use passes::{Passes, Watched};

/// This machine as a cluster: multiplies, attention, passes over memory, and exchanges between ranks
///
/// For each number of ranks, all are at work at once, with their shares of the cores: multiplies by themselves, and
/// steps of reference models, of which no other model is, counted operation by operation. All of it takes seconds, and
/// is done in several rounds, so that a machine whose speed changes is seen at several times. Rounds in which other
/// programs take the cores are done again.
#[derive(clap::Args)]
pub struct Args {
    /// Numbers of ranks that share the machine
    #[arg(long, default_value = "1,2,4", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Rounds through all that is measured
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Where to write it; `train` looks for runs/machine.toml
    #[arg(long, default_value = "runs/machine.toml")]
    out: PathBuf,
}

/// How long ranks wait for each other.
const PATIENCE: Duration = Duration::from_secs(120);
/// At most so many rounds for one that counts.
const AGAIN: usize = 3;
/// How often what makes no sense is measured.
const TRIES: usize = 2;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.ranks.is_empty() || args.ranks.contains(&0) {
        bail!("--ranks: numbers of at least 1, as in 1,2,4");
    }
    if args.rounds == 0 {
        bail!("--rounds 0: one round at least");
    }
    let seen = args.out.with_extension("seen.json");
    if world::is_launched() {
        return world::run(&start(None), PATIENCE, |world| pass::run(world, &seen));
    }
    if let Some(folder) = args.out.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut all: Vec<Passes> = args.ranks.iter().map(|ranks| Passes::new(*ranks)).collect();
    watch(&mut all, args.rounds, &seen)?;
    let mut shared = toml::Table::new();
    for passes in all {
        let ranks = passes.ranks.to_string();
        let cluster = measured(passes, args.rounds, &seen)?;
        let table = toml::Value::try_from(&cluster).context("a cluster is plain data")?;
        shared.insert(ranks, table);
    }
    let file = toml::Table::from_iter([("shared".to_string(), toml::Value::Table(shared))]);
    put(&args.out, &toml::to_string(&file)?)?;
    print_line!("written to {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

fn start(ranks: Option<usize>) -> Start {
    Start { engine: world::Engine::Shm, ranks, default_ranks: 1, logs: None }
}

/// Rounds, in each of which every number of ranks has a pass, until each has enough with nobody else at work.
fn watch(all: &mut [Passes], rounds: usize, seen: &Path) -> anyhow::Result<()> {
    for _ in 0..rounds * AGAIN {
        for passes in all.iter_mut().filter(|passes| passes.quiet() < rounds) {
            world::run(&start(Some(passes.ranks)), PATIENCE, |world| pass::run(world, seen))?;
            let pass =
                taken(seen).with_context(|| format!("measuring {} rank(s)", passes.ranks))?;
            passes.all.push(pass);
        }
    }
    Ok(())
}

/// What the first of the ranks left.
fn taken(path: &Path) -> anyhow::Result<Pass> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("the ranks did not write {}", path.display()))?;
    std::fs::remove_file(path)?;
    Ok(serde_json::from_str(&text)?)
}

/// The machine as it was watched; watched once more when that makes no sense.
fn measured(mut passes: Passes, rounds: usize, seen: &Path) -> anyhow::Result<Cluster> {
    let ranks = passes.ranks;
    for tried in 1..=TRIES {
        let watched = passes.together(rounds)?;
        let Watched { multiplies, steps, together, others, .. } = &watched;
        match fit(&blank(ranks, &watched)?, multiplies, steps, *together) {
            Ok(fitted) => {
                tell(ranks, &watched, &fitted);
                return Ok(fitted.cluster);
            }
            Err(why) if tried < TRIES => {
                print_error!("{why}; measuring {ranks} rank(s) again");
                passes.all.clear();
                watch(std::slice::from_mut(&mut passes), rounds, seen)?;
            }
            Err(why) => bail!(
                "{ranks} rank(s): {why}, also when measured again; other programs took {:.0}% of the cores: \
                 stop them, or ask for more --rounds",
                100.0 * others
            ),
        }
    }
    unreachable!("the last try returns")
}

/// Under its name there is the old file or the new one, whatever happens meanwhile.
fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    let hidden = path.with_extension("toml.part");
    std::fs::write(&hidden, text).with_context(|| format!("cannot write {}", hidden.display()))?;
    std::fs::rename(&hidden, path).with_context(|| format!("cannot write {}", path.display()))
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
        cores: Some(std::thread::available_parallelism().map_or(1, |cores| cores.get())),
        links: vec![link],
        engine: Engine::Lockstep,
        skew: Curve::default(),
        differs: Vec::new(),
    })
}

fn tell(ranks: usize, watched: &Watched, fitted: &Fitted) {
    let Cluster { accelerator: device, links, skew, .. } = &fitted.cluster;
    let threads = watched.steps[0].plan.train.threads;
    print_line!(
        "{ranks} rank(s) × {threads} thread(s): {:.0} GFLOP/s in f32 and {:.0} in bf16 of all cores; copies at {:.1} GB/s a rank, {:.1} in a cache",
        1e3 * device.peak.f32,
        1e3 * device.peak.bf16,
        watched.copied[1],
        watched.copied[0],
    );
    if ranks > 1 {
        print_line!(
            "  sums at {:.2} GB/s and {:.0} µs a meeting; waiting for slower ranks takes {:.1}% of a step of 0.1 s, {:.1}% of one of 10 s",
            links[0].bandwidth_gbs,
            links[0].hop_us,
            100.0 * skew.at(0.1).unwrap_or(0.0),
            100.0 * skew.at(10.0).unwrap_or(0.0)
        );
    }
    let worst = |of: fn(&(f64, f64)) -> f64| {
        fitted.steps.iter().map(|step| (of(step) - 1.0).abs()).fold(0.0, f64::max)
    };
    print_line!(
        "  fits multiplies within {:.1}% on average, and every reference step within {:.1}%; {:.1}% when left out",
        100.0 * fitted.matmul_error,
        100.0 * worst(|(with, _)| *with),
        100.0 * worst(|(_, without)| *without),
    );
    if watched.others > busy::TOLERATED {
        print_line!(
            "  other programs took {:.0}% of the cores meanwhile: these are figures of a busy machine",
            100.0 * watched.others
        );
    }
}

#[cfg(test)]
mod tests {
    use super::put;

    #[test]
    fn a_file_that_is_written_again_is_whole_and_alone() {
        let folder = std::env::temp_dir().join(format!("lockstep-put-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("machine.toml");
        for text in ["a longer one", "short"] {
            put(&path, text).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        assert!(put(&folder.join("no/such/machine.toml"), "text").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
