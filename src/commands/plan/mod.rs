//! `lockstep plan`: what a run would cost on a cluster, before anything is started; and what would be better.

mod preset;
mod print;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_plan::{Config, ConfigError, Plan};
use lockstep_sim::search::{Limits, Objective, Proposal, Search, SearchRequest};
use lockstep_sim::{Cluster, Options, estimate};

use crate::machine;
use crate::run_file::RunFile;

/// What a run costs on a cluster: memory by stage, traffic by link, time, and whether it fits
///
/// The cluster is a file (see examples/clusters), or a built-in one with its number of ranks: h100-64. A run file's
/// layout is priced as it stands; --search looks for the best of all layouts, and says why it is. A preset has no layout
/// of its own, so that it is always searched.
#[derive(clap::Args)]
pub struct Args {
    /// The run file (TOML)
    #[arg(required_unless_present = "preset", conflicts_with = "preset")]
    run: Option<PathBuf>,
    /// A named model instead of a run file: llama3-405b
    #[arg(long)]
    preset: Option<String>,
    /// h100-16384, or the path of a description; several ranks of this machine: what `bench machine` wrote
    #[arg(long)]
    cluster: String,
    /// Ranks [default: what the layout asks for, or what the cluster has]
    #[arg(long)]
    ranks: Option<usize>,
    /// A value laid over the run file's: --set layout.tensor=8
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Look for the best layouts, and show so many
    #[arg(long, value_name = "COUNT", num_args = 0..=1, default_missing_value = "5")]
    search: Option<usize>,
    /// What is best
    #[arg(long, value_enum, default_value = "time")]
    by: Best,
    /// Dollars for a rank and hour, for --by cost
    #[arg(long, default_value_t = 2.0)]
    price: f64,
    /// The ladder from plain data parallel on: which means pay, and which do not
    #[arg(long)]
    advice: bool,
    /// Multiply layers' matrices in 8 bits
    #[arg(long)]
    fp8: bool,
    /// One JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Also write a page to look at
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Best {
    /// The fastest step
    Time,
    /// The least memory on the fullest rank
    Memory,
    /// The least rank-hours, on as many ranks or fewer
    Cost,
}

impl Best {
    fn by(self) -> Objective {
        match self {
            Best::Time => Objective::Time,
            Best::Memory => Objective::Memory,
            Best::Cost => Objective::Cost,
        }
    }
}

/// What is planned.
struct Asked {
    config: Config,
    vocab: Option<usize>,
    cluster: Cluster,
    ranks: usize,
    options: Options,
    /// What the command decided for somebody who did not say it.
    chosen: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let asked = ask(&args)?;
    let searched =
        args.search.is_some() || args.preset.is_some() && asked.config.layout == Default::default();
    let typed = if searched { None } else { Some(priced(&asked)?) };
    let wanted = SearchRequest {
        config: &asked.config,
        vocab: asked.vocab,
        cluster: &asked.cluster,
        options: &asked.options,
        ranks: ranks_to_try(&asked, args.by),
    };
    let search = match searched || args.advice {
        true => Some(Search::new(&wanted).map_err(told)?),
        false => None,
    };
    let found = match &search {
        Some(search) if searched => {
            let found =
                search.best(args.by.by(), args.search.unwrap_or(5).max(1), &Limits::default());
            if found.is_empty() {
                bail!("{}", nothing_fits(search, &asked));
            }
            found
        }
        _ => Vec::new(),
    };
    let shown = typed.as_ref().or(found.first()).context("a layout that was typed or found")?;
    let outcome = print::Outcome {
        shown,
        found: &found,
        search: search.as_ref(),
        by: args.by.by(),
        price: args.price,
        advice: args.advice,
        chosen: asked.chosen.as_deref(),
        cluster: &asked.cluster,
    };
    match args.json {
        true => outcome.json()?,
        false => outcome.text(),
    }
    if let Some(path) = &args.html {
        std::fs::write(path, outcome.html())
            .with_context(|| format!("cannot write {}", path.display()))?;
        if !args.json {
            println!("the page is {}", path.display());
        }
    }
    Ok(if shown.estimate.fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The run, the cluster and the number of ranks, from what was typed.
fn ask(args: &Args) -> anyhow::Result<Asked> {
    let early = machine::cluster(&args.cluster, args.ranks);
    let (config, vocab, chosen) = match (&args.run, &args.preset) {
        (Some(path), _) => {
            let (config, vocab) = RunFile::typed(path, &args.sets)?;
            (config, vocab, None)
        }
        (None, Some(name)) => {
            let cluster = early.as_ref().ok().and_then(|cluster| cluster.ranks);
            let ranks = args.ranks.or(cluster).unwrap_or(8);
            let (config, chosen) = preset::run(name, ranks, &args.sets)?;
            let vocab = RunFile::of(config.clone()).ok().map(|file| file.source.vocab());
            (config, vocab, Some(chosen))
        }
        (None, None) => bail!("give a run file or --preset"),
    };
    let laid_out = config.layout.data.is_some() || config.ranks() > 1;
    let typed = args.ranks.or(laid_out.then(|| config.ranks()));
    let cluster = machine::cluster(&args.cluster, typed)?;
    let ranks = match args.search.is_some() {
        true => args.ranks.or(cluster.ranks).or(typed),
        false => typed.or(cluster.ranks),
    };
    let Some(ranks) = ranks.filter(|ranks| *ranks > 0) else {
        bail!(
            "how many ranks? Say --ranks 64, --cluster {}-64, or a layout in the run file",
            args.cluster
        );
    };
    if let Some(most) = cluster.ranks.filter(|most| *most < ranks) {
        bail!("{} ranks, but {} has {most}", ranks, cluster.name);
    }
    let options = Options { fp8: args.fp8, ..machine::options(&cluster, ranks) };
    Ok(Asked { config, vocab, cluster, ranks, options, chosen })
}

/// The layout that was typed.
fn priced(asked: &Asked) -> anyhow::Result<Proposal> {
    let env = asked.cluster.environment(asked.ranks, asked.vocab);
    let plan = Plan::resolve(&asked.config, &env).map_err(told)?;
    let estimate = estimate(&plan, &asked.cluster, &asked.options);
    Ok(Proposal { plan, estimate })
}

/// All of them; where money counts also fewer, by halves of whole hosts and then of one.
fn ranks_to_try(asked: &Asked, by: Best) -> Vec<usize> {
    let mut ranks = vec![asked.ranks];
    while by == Best::Cost && ranks[ranks.len() - 1].is_multiple_of(2) {
        ranks.push(ranks[ranks.len() - 1] / 2);
    }
    ranks
}

fn nothing_fits(search: &Search, asked: &Asked) -> String {
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    match search.smallest(&Limits::default()) {
        None => format!(
            "no layout of {} ranks: neither the batch of {} sequences nor the model can be cut like that; \
             try another number of ranks, or a global batch that has more divisors",
            asked.ranks,
            asked.config.train.global_batch.unwrap_or(32)
        ),
        Some(smallest) => format!(
            "nothing fits on {} × {} ({:.1} GiB): the smallest layout, {}, needs {:.1} GiB; take more ranks",
            asked.ranks,
            asked.cluster.accelerator.name,
            asked.cluster.accelerator.memory_gib,
            lockstep_sim::search::layout_words(&smallest.plan),
            gib(smallest.bytes())
        ),
    }
}

fn told(mistakes: Vec<ConfigError>) -> anyhow::Error {
    let told: Vec<String> = mistakes.iter().map(ConfigError::to_string).collect();
    match told.as_slice() {
        [one] => anyhow::anyhow!("{one}"),
        many => anyhow::anyhow!("{} errors:\n  {}", many.len(), many.join("\n  ")),
    }
}
