//! `lockstep plan`: predicts the cost of a run on a cluster and searches for better layouts.

mod preset;
mod print;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use lockstep_plan::config::{Layout, Offload};
use lockstep_plan::{Config, ConfigError, Dtype, Plan};
use lockstep_sim::search::{Limits, Objective, Proposal, Search, SearchRequest};
use lockstep_sim::{Cluster, Options, estimate};

use crate::commands::progress::Quiet;
use crate::machine;
use crate::run_file::RunFile;

/// Predict memory, traffic and step time of a run on a cluster, and whether it fits
///
/// The cluster is a file (see examples/clusters) or a built-in name with a number of ranks, e.g. h100-64. The layout of
/// the run file is used as it is; --search finds the best of all layouts and explains it. A preset has no layout, so it
/// is always searched.
#[derive(clap::Args)]
pub struct Args {
    /// Run file (TOML)
    #[arg(required_unless_present = "preset", conflicts_with = "preset")]
    run: Option<PathBuf>,
    /// Named model instead of a run file, e.g. llama3-405b
    #[arg(long)]
    preset: Option<String>,
    /// Cluster: a built-in name such as h100-16384, or a description file (for this machine, the file written by
    /// `bench machine`)
    #[arg(long)]
    cluster: String,
    /// Number of ranks [default: those of the layout, or of the cluster]
    #[arg(long)]
    ranks: Option<usize>,
    /// Override a key of the run file, e.g. --set layout.tensor=8
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// Search for the best layouts and show COUNT of them [default: 5]
    #[arg(long, value_name = "COUNT", num_args = 0..=1, default_missing_value = "5")]
    search: Option<usize>,
    /// Quantity to minimize
    #[arg(long, value_enum, default_value = "time")]
    by: Best,
    /// Dollars per rank and hour, for --by cost
    #[arg(long, default_value_t = 2.0, value_parser = price)]
    price: f64,
    /// Show step by step, from plain data parallelism on, which techniques pay off
    #[arg(long)]
    advice: bool,
    /// Compute the matmuls of layers in FP8 (needs bf16 and an accelerator with FP8)
    #[arg(long)]
    fp8: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Also write an HTML page to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    quiet: Quiet,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Best {
    /// Step time
    Time,
    /// Memory of the fullest rank
    Memory,
    /// Rank-hours, on at most the given number of ranks
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

/// Input of the command.
struct Input {
    config: Config,
    vocab: Option<usize>,
    cluster: Cluster,
    ranks: usize,
    options: Options,
    /// Description of values that the command chose for a preset.
    chosen: Option<String>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut input = read_input(&args)?;
    let layout = Layout { offload: None, ..input.config.layout.clone() };
    let searched = args.search.is_some() || args.preset.is_some() && layout == Default::default();
    if let Some(code) = report(&args, &input, searched)? {
        return Ok(code);
    }
    if choose_offload(&mut input, args.by)
        && let Some(code) = report(&args, &input, searched)?
    {
        return Ok(code);
    }
    bail!("{}", nothing_fits(&input, args.by)?);
}

/// Prints the layout of the run, or those that are found. None if nothing fits.
fn report(args: &Args, input: &Input, searched: bool) -> anyhow::Result<Option<ExitCode>> {
    let typed = if searched { None } else { Some(estimate_layout(input)?) };
    let request = input.request(args.by);
    let search = match searched || args.advice {
        true => Some(Search::new(&request).map_err(config_errors)?),
        false => None,
    };
    let found = match &search {
        Some(search) if searched => {
            let bar = args.quiet.spinner("search");
            let found =
                search.best(args.by.by(), args.search.unwrap_or(5).max(1), &Limits::default());
            bar.finish_and_clear();
            if found.is_empty() {
                return Ok(None);
            }
            found
        }
        _ => Vec::new(),
    };
    let shown = typed.as_ref().or(found.first()).context("no layout was given or found")?;
    if args.fp8 && shown.plan.precision.compute == Dtype::F32 {
        bail!("--fp8: this run computes in f32; use --set precision.compute=bf16");
    }
    let outcome = print::Outcome {
        shown,
        found: &found,
        search: search.as_ref(),
        by: args.by.by(),
        price: args.price,
        advice: args.advice,
        chosen: input.chosen.as_deref(),
        cluster: &input.cluster,
        options: &input.options,
    };
    match args.json {
        true => outcome.json()?,
        false => outcome.text(),
    }
    if let Some(path) = &args.html {
        std::fs::write(path, outcome.html())
            .with_context(|| format!("cannot write {}", path.display()))?;
        if !args.json {
            println!("wrote {}", path.display());
        }
    }
    Ok(Some(if shown.estimate.fits { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// If the run has GPUs and no offload mode, sets the first mode with which something fits. False if there is none.
fn choose_offload(input: &mut Input, by: Best) -> bool {
    if !input.cluster.has_gpus() || input.config.layout.offload.is_some() {
        return false;
    }
    for mode in [Offload::Optimizer, Offload::OptimizerGradients, Offload::All] {
        input.config.layout.offload = Some(mode);
        let request = input.request(by);
        // Not every model supports every mode.
        let Ok(search) = Search::new(&request) else { continue };
        if search.best(Objective::Memory, 1, &Limits::default()).is_empty() {
            continue;
        }
        let note = format!("offload={}: nothing fits without it", mode.name());
        let chosen = input.chosen.take().map(|chosen| chosen + "\n").unwrap_or_default();
        input.chosen = Some(chosen + &note);
        return true;
    }
    input.config.layout.offload = None;
    false
}

/// Reads the run, the cluster and the number of ranks from the arguments.
fn read_input(args: &Args) -> anyhow::Result<Input> {
    let early = machine::cluster(&args.cluster, args.ranks, None);
    let (config, vocab, chosen) = match (&args.run, &args.preset) {
        (Some(path), _) => {
            let (config, vocab) = RunFile::read_without_data(path, &args.sets)?;
            (config, vocab, None)
        }
        (None, Some(name)) => {
            let cluster = early.as_ref().ok().and_then(|cluster| cluster.ranks);
            let ranks = args.ranks.or(cluster).unwrap_or(8);
            let (config, chosen) = preset::run(name, ranks, &args.sets)?;
            let vocab = RunFile::open(config.clone()).ok().map(|file| file.source.vocab());
            (config, vocab, Some(chosen))
        }
        (None, None) => bail!("no run file; give a run file or --preset"),
    };
    let laid_out = config.layout.data.is_some() || config.ranks() > 1;
    let typed = args.ranks.or(laid_out.then(|| config.ranks()));
    let cluster = machine::shared_cluster(&args.cluster, typed)?;
    let ranks = match args.search.is_some() {
        true => args.ranks.or(cluster.ranks).or(typed),
        false => typed.or(cluster.ranks),
    };
    let Some(ranks) = ranks.filter(|ranks| *ranks > 0) else {
        bail!(
            "the number of ranks is unknown; use --ranks 64, --cluster {}-64, or a layout in the run file",
            args.cluster
        );
    };
    cluster
        .check_size(ranks)
        .map_err(|why| anyhow::anyhow!("--cluster {}: {why}", args.cluster))?;
    if args.fp8 && cluster.accelerator.peak.fp8.is_none() {
        bail!(
            "--fp8: {} has no FP8; remove --fp8, use another cluster, or set peak.fp8 of the accelerator",
            cluster.accelerator.name
        );
    }
    let options = Options { fp8: args.fp8, ..machine::options(&cluster, ranks) };
    Ok(Input { config, vocab, cluster, ranks, options, chosen })
}

/// The layout of the run file with its estimate.
fn estimate_layout(input: &Input) -> anyhow::Result<Proposal> {
    let env = input.cluster.environment(input.ranks, input.vocab);
    let plan = Plan::resolve(&input.config, &env).map_err(config_errors)?;
    let estimate = estimate(&plan, &input.cluster, &input.options);
    Ok(Proposal { plan, estimate })
}

impl Input {
    fn request(&self, by: Best) -> SearchRequest<'_> {
        let Input { config, vocab, cluster, options, .. } = self;
        let ranks = self.ranks_to_try(by);
        SearchRequest { config, vocab: *vocab, cluster, options, ranks }
    }

    /// The given number of ranks; for `--by cost` also smaller numbers, halved repeatedly.
    fn ranks_to_try(&self, by: Best) -> Vec<usize> {
        let mut ranks = vec![self.ranks];
        while by == Best::Cost && ranks[ranks.len() - 1].is_multiple_of(2) {
            ranks.push(ranks[ranks.len() - 1] / 2);
        }
        ranks
    }
}

/// Parses `--price`.
fn price(text: &str) -> Result<f64, String> {
    let price = text.parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
    price.ok_or_else(|| "use a number of dollars, e.g. 2.5".into())
}

fn nothing_fits(input: &Input, by: Best) -> anyhow::Result<String> {
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    let request = input.request(by);
    let search = Search::new(&request).map_err(config_errors)?;
    let tried = match input.config.layout.offload {
        None if input.cluster.has_gpus() => "; no offload mode is enough",
        _ => "",
    };
    Ok(match search.smallest(&Limits::default()) {
        None => format!(
            "no valid layout of {} ranks: they do not divide the global batch of {} sequences or the model; \
             use another number of ranks, or a global batch with more divisors",
            input.ranks,
            input.config.train.global_batch.unwrap_or(32)
        ),
        Some(smallest) => format!(
            "nothing fits on {} × {} ({:.1} GiB): the smallest layout, {}, needs {:.1} GiB{tried}; use more ranks",
            input.ranks,
            input.cluster.accelerator.name,
            input.cluster.accelerator.memory_gib,
            lockstep_sim::search::layout_words(&smallest.plan),
            gib(smallest.bytes())
        ),
    })
}

fn config_errors(errors: Vec<ConfigError>) -> anyhow::Error {
    let texts: Vec<String> = errors.iter().map(ConfigError::to_string).collect();
    match texts.as_slice() {
        [one] => anyhow::anyhow!("{one}"),
        many => anyhow::anyhow!("{} errors:\n  {}", many.len(), many.join("\n  ")),
    }
}
